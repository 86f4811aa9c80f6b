"""Moments (count, mean, m2) and their merge, as in src/core/moments.h."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Moments:
    """Moments per channel, in float64."""

    count: float
    mean: Any
    m2: Any  # the sum of (x - mean)^2

    def merge(self, other: Moments) -> Moments:
        """Return the Moments of both sets; doi:10.1080/00031305.1983.10483115."""
        count = self.count + other.count
        delta, weight = other.mean - self.mean, other.count / count
        m2 = self.m2 + other.m2 + delta**2 * self.count * weight
        return Moments(count, self.mean + delta * weight, m2)
