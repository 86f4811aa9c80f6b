"""Shares rows evenly: if they cannot be equal, the first shares get one row more.

The same for devices and for processes. It must not know what the rows are.
"""

from __future__ import annotations


def share_bounds(rows: int, count: int) -> list[tuple[int, int]]:
    """(begin, end) of each of `count` shares of `rows` rows."""
    share, more = divmod(rows, count)
    bounds = [k * share + min(k, more) for k in range(count + 1)]
    return list(zip(bounds, bounds[1:]))
