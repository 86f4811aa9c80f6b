"""Even shares of a number of rows; the first shares get the remaining rows."""

from __future__ import annotations


def share_bounds(rows: int, count: int) -> list[tuple[int, int]]:
    """Return (begin, end) of each of `count` shares of `rows` rows."""
    share, more = divmod(rows, count)
    bounds = [k * share + min(k, more) for k in range(count + 1)]
    return list(zip(bounds, bounds[1:]))
