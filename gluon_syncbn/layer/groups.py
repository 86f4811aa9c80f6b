"""The argument ``group=`` of a layer: with which ranks or contexts it synchronizes.

Called by ``batch_norm.py``. It must not know what is exchanged.
"""

from __future__ import annotations

from typing import Any, Sequence

import mxnet as mx

from ..common.arguments import check_contexts, check_int, is_int, shown
from ..native import world

_EXPECTED = (
    'None, "machine", "process", a list of ranks, a list of contexts, or a list of '
    "such lists"
)


def groups_of(k: int, contexts: Sequence[mx.Context] | None = None) -> list[list]:
    """Cuts the processes, or some contexts of this process, into groups of `k`.

    Parameters
    ----------
    k : int
        Size of a group, at least 1. The last group has the rest.
    contexts : list of mxnet.Context, optional
        The contexts to cut; None means the ranks of all processes.

    Returns
    -------
    list of lists
        Of ranks or of contexts, for the argument `group` of
        :class:`gluon_syncbn.SyncBatchNorm`.

    Raises
    ------
    ValueError
        If `k` is less than 1, or `contexts` is empty or names one twice.
    TypeError
        If `k` is no int, or `contexts` holds something else than contexts.

    Examples
    --------
    >>> import mxnet as mx
    >>> from gluon_syncbn.distributed import groups_of
    >>> groups_of(2, [mx.cpu(i) for i in range(4)])
    [[cpu(0), cpu(1)], [cpu(2), cpu(3)]]
    """
    check_int("k", k, least=1)
    if contexts is None:
        members = list(range(world.size()))
    else:
        members = check_contexts("contexts", contexts)
    return [members[i : i + k] for i in range(0, len(members), k)]


def check(group: Any) -> None:
    """Raises TypeError or ValueError unless `group` is what a layer takes."""
    if group is None or isinstance(group, str) and group in ("machine", "process"):
        return
    parts = _parts(group) if isinstance(group, (list, tuple)) else []
    members = [member for part in parts for member in part]
    ranks = all(is_int(member) for member in members)
    contexts = all(isinstance(member, mx.Context) for member in members)
    if not members or not (ranks or contexts):
        raise TypeError(f"group is {_EXPECTED}, but got {shown(group)}")
    if not all(parts):
        raise ValueError(f"group holds an empty list: {shown(group)}, expected none")
    for member in members:
        if members.count(member) > 1:
            raise ValueError(f"group names {member} {members.count(member)} times")
        if ranks and member < 0:
            raise ValueError(f"group names the rank {member}, expected 0 or more")


def attributes(
    group: Any, contexts: Sequence[mx.Context], layer: str
) -> dict[str, str]:
    """The operator's attributes for a group that `check` has passed."""
    if group is None:
        return {}
    if group == "process":
        return {"ranks": "self"}
    if group == "machine":
        here = world.world().of_machine() if world.is_initialized() else [0]
        return {"ranks": _text(here) if len(here) > 1 else "self"}
    parts = context_parts(group)
    if parts is None:
        return {"ranks": _ranks(_parts(group), layer)}
    for context in contexts:
        if not any(context in part for part in parts):
            raise ValueError(
                f"SyncBatchNorm '{layer}': is initialized on {context}, which is in "
                f"none of the groups of contexts {parts}"
            )
    return {"ranks": "self", "device_groups": ";".join(map(_text, parts))}


def context_parts(group: Any) -> Sequence | None:
    """The groups of contexts; None if `group` names no contexts."""
    parts = _parts(group) if isinstance(group, (list, tuple)) else [[group]]
    return parts if isinstance(parts[0][0], mx.Context) else None


def _ranks(parts, layer):
    highest = max(rank for part in parts for rank in part)
    if highest >= world.size():
        raise ValueError(
            f"SyncBatchNorm '{layer}': group names the rank {highest}, expected ranks "
            f"below {world.size()}, the number of processes"
            + ("" if world.is_initialized() else " before distributed.init()")
        )
    for part in parts:
        if world.rank() in part:
            return _text(sorted(part)) if len(part) > 1 else "self"
    raise ValueError(
        f"SyncBatchNorm '{layer}': group={parts if len(parts) > 1 else parts[0]} does "
        f"not hold the rank {world.rank()} of this process"
    )


def _parts(group):
    """The list of lists that `group` stands for."""
    if all(isinstance(part, (list, tuple)) for part in group):
        return group
    return [group]


def _text(members):
    return " ".join(map(str, members))
