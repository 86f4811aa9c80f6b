"""Count, mean and sum of squared deviations of sets of numbers, and how two sets merge.

src/core/moments.h is the same in C++.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Moments:
    """Of each channel, in float64."""

    count: float
    mean: Any
    m2: Any  # the sum of (x - mean)^2

    def merge(self, other: Moments) -> Moments:
        """The Moments of both sets; doi:10.1080/00031305.1983.10483115."""
        count = self.count + other.count
        delta, weight = other.mean - self.mean, other.count / count
        m2 = self.m2 + other.m2 + delta**2 * self.count * weight
        return Moments(count, self.mean + delta * weight, m2)
