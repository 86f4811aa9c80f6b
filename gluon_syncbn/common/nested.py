"""Flatten and rebuild nested lists, tuples and dicts of arrays."""

from __future__ import annotations

import copy
from typing import Any, Iterator

import mxnet as mx


def flatten(value: Any) -> list:
    """Return the leaves of nested lists, tuples and dicts in order."""
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in flatten(item)]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in flatten(item)]
    return [value]


def arrays_in(value: Any) -> list[mx.nd.NDArray]:
    """Return the leaves that are NDArrays."""
    return [leaf for leaf in flatten(value) if isinstance(leaf, mx.nd.NDArray)]


def rebuild(value: Any, leaves: Iterator) -> Any:
    """Return `value` with its leaves replaced by the items of `leaves`."""
    if isinstance(value, dict):
        rebuilt = copy.copy(value)
        rebuilt.update((key, rebuild(item, leaves)) for key, item in value.items())
        return rebuilt
    if isinstance(value, (list, tuple)):
        items = [rebuild(item, leaves) for item in value]
        # The constructor of a named tuple takes each field as an argument.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return next(leaves)
