"""All that a SyncBatchNorm has beyond a BatchNorm: with whom it synchronizes, and how.

It must not know how a layer is computed.
"""

from __future__ import annotations

import collections
import threading
import uuid
import weakref
from typing import Any, NamedTuple, Sequence

from ..common.arguments import (
    check_bool,
    check_choice,
    check_int,
    comma_list,
    is_int,
    short_repr,
)
from ..native import steps
from ..native.failures import check_timeout, here, watch_process
from ..native.library import load
from ..native.program import warn
from ..native.world import world
from .activations import NONE, Activation

NONFINITE = "propagate", "skip", "raise"
_EXPECTED = 'None, "machine", "process", a list of ranks, or a list of such lists'


class Settings(NamedTuple):
    """With whom a layer synchronizes, and how; see the arguments of SyncBatchNorm."""

    num_devices: int | None
    unbiased_running_var: bool
    timeout: float | None
    group: str | Sequence | None
    nonfinite: str

    def validate(self) -> Settings:
        """The same ones; TypeError or ValueError for a bad one."""
        num_devices, is_unbiased, timeout, group, nonfinite = self
        if num_devices is not None:
            if not is_int(num_devices):
                raise TypeError(
                    f"num_devices is an int or None, but got {short_repr(num_devices)}"
                )
            check_int("num_devices", num_devices, minimum=1, maximum=2**31 - 1)
        is_unbiased = check_bool("unbiased_running_var", is_unbiased)
        timeout = None if timeout is None else check_timeout(timeout)
        _check_group(group)
        check_choice("nonfinite", nonfinite, NONFINITE)
        return Settings(num_devices, is_unbiased, timeout, group, nonfinite)


class SyncState:
    """A layer's settings, its handle, its activation, and what it was before."""

    def __init__(
        self, original: tuple[type, dict] | None = None, activation: Activation = NONE
    ) -> None:
        self.original = original  # the converted BatchNorm's class and settings
        self.activation = activation

    def synchronize(self, layer: str, settings: Settings) -> None:
        """Sets with whom the layer of that name synchronizes, and how."""
        self.settings = settings
        self.handle = LayerHandle(layer, settings.group)

    def adopt(self, attributes: dict[str, str]) -> None:
        """Become the layer that an operator of these attributes belongs to."""
        ranks = attributes.get("ranks")
        group: Any = ranks and ("process" if ranks == "self" else ranks_of(attributes))
        self.settings = Settings(
            int(attributes.get("num_devices", 0)) or None,
            attributes.get("unbiased_running_var") in ("True", "1"),
            float(attributes.get("timeout", 0)) or None,
            group,
            attributes.get("nonfinite", NONFINITE[0]),
        )
        key = attributes["layer_key"]
        self.handle = LayerHandle(attributes["layer"], group, key)


class LayerHandle:
    """A layer in native code, where its devices meet; alive as long as this object.

    With a `key` it is the layer of a graph that is there already.

    The key is unique, unlike a block's prefix: two nets may have equal prefixes. Other
    processes know the layer by its name, and if there are several of that name, by
    which one of them was made first: a program that is the same on all ranks makes them
    in the same order.
    """

    _made = collections.Counter()
    has_warned = False  # of a loop over CPU contexts

    def __init__(
        self, layer: str, group: str | Sequence | None = None, key: str | None = None
    ) -> None:
        self.name = layer
        self.parameters: dict = {}  # of the layer, by name
        self._group = group
        self.shared_name = layer
        if key is None:  # the layer of a graph has been counted where it was made
            self._made[layer] += 1
            if self._made[layer] > 1:
                self.shared_name += f" (number {self._made[layer]} of that name)"
        self.key = key or uuid.uuid4().hex
        watch_process()
        load().gluon_syncbn_create_layer(self.key, layer, key is None)
        release = load().gluon_syncbn_release_layer
        self._finalizer = weakref.finalize(self, release, self.key)
        self._finalizer.atexit = False
        steps.layers.add(self)

    def use(self, parameters: dict) -> None:
        """Register a call's parameters, by name: their trainers' steps wait."""
        if self.parameters is not parameters:
            self.parameters = parameters
            steps.guard_trainers(parameters.values())

    def check_thread(self, contexts: list, settings: Settings) -> None:
        """Warn of a call that will wait in vain for the other CPU contexts."""
        contexts = list(here.participants) or contexts
        is_main = threading.current_thread() is threading.main_thread()
        is_loop = is_main and not here.contexts and settings.num_devices != 1
        on_cpus = all(context.device_type == "cpu" for context in contexts)
        if is_loop and on_cpus and len(contexts) > 1 and not LayerHandle.has_warned:
            LayerHandle.has_warned = True
            warn(
                f"SyncBatchNorm '{self.name}' is on {comma_list(contexts)}, and the "
                "main thread calls it. A loop over CPU contexts can wait until the "
                "timeout, because operators of one thread share memory. Call "
                "convert_sync_batchnorm(net) or allow_plain_loop(net) with the net "
                "that the loop calls"
            )

    def release(self) -> None:
        """The layer is a SyncBatchNorm no longer."""
        parameters, self.parameters = self.parameters, {}
        steps.release_trainers(parameters.values())

    def __reduce__(self):  # a copy gets another key
        return LayerHandle, (self.name, self._group)

    def is_alone(self) -> bool:
        """Tells whether it would use other processes, and none is connected."""
        return world().size == 1 and self._group != "process"

    def is_connected(self) -> bool:
        """Return True if it synchronizes with other processes."""
        return len(ranks_of(group_attributes(self._group, self.name))) > 1


def _check_group(group):
    """TypeError or ValueError unless `group` is what a layer takes."""
    if group is None or isinstance(group, str) and group in ("machine", "process"):
        return
    groups = _groups(group)
    members = [member for one in groups for member in one]
    if not members or not all(map(is_int, members)):
        raise TypeError(f"group is {_EXPECTED}, but got {short_repr(group)}")
    if not all(groups):
        raise ValueError(
            f"group holds an empty list: {short_repr(group)}, expected none"
        )
    for member in members:
        if members.count(member) > 1:
            raise ValueError(f"group names {member} {members.count(member)} times")
        if member < 0:
            raise ValueError(f"group names the rank {member}, expected 0 or more")


def group_attributes(group: Any, layer: str) -> dict[str, str]:
    """The operator's attributes for the group of a layer's settings."""
    if group is None:
        return {}
    if group == "process":
        return {"ranks": "self"}
    if group == "machine":
        return {"ranks": _ranks(world().of_machine)}
    return {"ranks": _ranks(_own_ranks(_groups(group), layer))}


def ranks_of(attributes: dict[str, str]) -> list[int]:
    """The ranks that an operator of these attributes synchronizes with, its own too."""
    ranks = attributes.get("ranks")
    if ranks is None:
        return list(range(world().size))
    return [world().rank] if ranks == "self" else list(map(int, ranks.split()))


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
    return " ".join(map(str, ranks)) if len(ranks) > 1 else "self"
