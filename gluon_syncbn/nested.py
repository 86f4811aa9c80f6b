"""Nested lists, tuples and dicts, whose leaves may be arrays."""

from __future__ import annotations

import copy
from typing import Any, Iterator

import mxnet as mx


def flatten(value: Any) -> list:
    """Return the leaves of nested lists, tuples and dicts in order."""
    leaves, pending = [], [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending.extend(reversed(list(item.values())))
        elif isinstance(item, (list, tuple)):
            pending.extend(reversed(item))
        else:
            leaves.append(item)
    return leaves


def arrays_in(value: Any) -> list[mx.nd.NDArray]:
    return [leaf for leaf in flatten(value) if isinstance(leaf, mx.nd.NDArray)]


def rebuild(value: Any, leaves: Iterator) -> Any:
    """Return `value` with its leaves replaced by the items of `leaves`."""
    if not isinstance(value, (dict, list, tuple)):
        return next(leaves)
    items = [
        rebuild(item, leaves) if isinstance(item, (dict, list, tuple)) else next(leaves)
        for item in (value.values() if isinstance(value, dict) else value)
    ]
    if isinstance(value, dict):
        rebuilt = copy.copy(value)
        rebuilt.update(zip(value, items))
        return rebuilt
    # The constructor of a named tuple takes each field as an argument.
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
