"""Takes nested lists, tuples and dicts of arrays apart, and puts them together again.

It knows nothing of devices or of what the arrays mean.
"""

from __future__ import annotations

import copy
from typing import Any, Iterator

import mxnet as mx


def flatten(value: Any) -> list:
    """The leaves of nested lists, tuples and dicts, in order."""
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in flatten(item)]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in flatten(item)]
    return [value]


def arrays_in(value: Any) -> list[mx.nd.NDArray]:
    """The leaves that are NDArrays."""
    return [leaf for leaf in flatten(value) if isinstance(leaf, mx.nd.NDArray)]


def rebuild(value: Any, leaves: Iterator) -> Any:
    """`value` with its leaves replaced by those of the iterator `leaves`."""
    if isinstance(value, dict):
        rebuilt = copy.copy(value)
        rebuilt.update((key, rebuild(item, leaves)) for key, item in value.items())
        return rebuilt
    if isinstance(value, (list, tuple)):
        items = [rebuild(item, leaves) for item in value]
        # A named tuple takes its fields one by one.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return next(leaves)
