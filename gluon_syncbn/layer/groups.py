"""The argument ``group=`` of a layer: with which ranks or contexts it synchronizes.

Called by ``synchronization.py``. It must not know what is exchanged.
"""

from __future__ import annotations

from typing import Any, Sequence

import mxnet as mx

from ..common.arguments import is_int, shown
from ..native.world import world

_EXPECTED = (
    'None, "machine", "process", a list of ranks, a list of contexts, or a list of '
    "such lists"
)


def check(group: Any) -> None:
    """Raises TypeError or ValueError unless `group` is what a layer takes."""
    if group is None or isinstance(group, str) and group in ("machine", "process"):
        return
    groups = _groups(group)
    members = [member for one in groups for member in one]
    ranks = all(is_int(member) for member in members)
    contexts = all(isinstance(member, mx.Context) for member in members)
    if not members or not (ranks or contexts):
        raise TypeError(f"group is {_EXPECTED}, but got {shown(group)}")
    if not all(groups):
        raise ValueError(f"group holds an empty list: {shown(group)}, expected none")
    for member in members:
        if members.count(member) > 1:
            raise ValueError(f"group names {member} {members.count(member)} times")
        if ranks and member < 0:
            raise ValueError(f"group names the rank {member}, expected 0 or more")


def of_contexts(group: Any) -> Sequence | None:
    """The groups of contexts; None if `group` names no contexts."""
    groups = _groups(group)
    return groups if groups and isinstance(groups[0][0], mx.Context) else None


def attributes(
    group: Any, contexts: Sequence[mx.Context], layer: str
) -> dict[str, str]:
    """The operator's attributes for a group that `check` has passed."""
    if group is None:
        return {}
    if group == "process":
        return {"ranks": "self"}
    if group == "machine":
        return {"ranks": _ranks(world().of_machine())}
    groups = of_contexts(group)
    if groups is None:
        return {"ranks": _ranks(_own_ranks(_groups(group), layer))}
    for context in contexts:
        if not any(context in one for one in groups):
            raise ValueError(
                f"SyncBatchNorm '{layer}': is initialized on {context}, which is in "
                f"none of the groups of contexts {groups}"
            )
    return {"ranks": "self", "device_groups": ";".join(map(_text, groups))}


def _own_ranks(groups, layer):
    """The group of ranks that this process is in."""
    highest = max(rank for one in groups for rank in one)
    if highest >= world().size:
        raise ValueError(
            f"SyncBatchNorm '{layer}': group names the rank {highest}, expected ranks "
            f"below {world().size}, the number of processes"
            + ("" if world().is_connected else " before distributed.init()")
        )
    for one in groups:
        if world().rank in one:
            return sorted(one)
    raise ValueError(
        f"SyncBatchNorm '{layer}': group={groups if len(groups) > 1 else groups[0]} "
        f"does not hold the rank {world().rank} of this process"
    )


def _groups(group):
    """The list of groups that the argument stands for; none if it is no list."""
    if not isinstance(group, (list, tuple)):
        return []
    if all(isinstance(element, (list, tuple)) for element in group):
        return group
    return [group]


def _ranks(ranks):
    return _text(ranks) if len(ranks) > 1 else "self"


def _text(members):
    return " ".join(map(str, members))
