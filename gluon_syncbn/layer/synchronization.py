"""All that a SyncBatchNorm has beyond a BatchNorm: with whom it synchronizes, and how.

It must not know how a layer is computed.
"""

from __future__ import annotations

import collections
import ctypes
import threading
import uuid
import weakref
from typing import Any, Iterable, NamedTuple, Sequence

from ..common.arguments import (
    check_bool,
    check_choice,
    check_int,
    comma_list,
    is_int,
    short_repr,
)
from ..native import steps
from ..native.failures import check_timeout, here, warn, watch_process
from ..native.library import LayerOptions, load
from ..native.processes import world
from .activations import NAMES, NONE, Activation

NONFINITE = "propagate", "skip", "raise"
_EXPECTED = 'None, "machine", "process", a list of ranks, or a list of such lists'


class Settings(NamedTuple):
    """With whom a layer synchronizes, and how; see the arguments of SyncBatchNorm."""

    num_devices: int | None = None
    unbiased_running_var: bool = False
    timeout: float | None = None
    group: str | Sequence | None = None
    nonfinite: str = NONFINITE[0]

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


class Synchronization:
    """All that a layer has beyond a BatchNorm, in Python and in native code.

    Nodes of graphs have the key of their layer alone. It is unique, unlike a block's
    prefix: two nets may have equal prefixes. Other processes know the layer by its
    name, and if there are several of that name, by which one of them was made first: a
    program that is the same on all ranks makes them in the same order.
    """

    _made = collections.Counter()
    _of_symbols: set = set()  # they outlive their blocks, as their symbols may do
    has_warned = False  # of a loop over CPU contexts

    def __init__(
        self,
        name: str,
        settings: Settings,
        activation: Activation = NONE,
        original: tuple[type, dict] | None = None,
    ) -> None:
        self.name, self.settings, self.activation = name, settings, activation
        self.original = original  # the converted BatchNorm's class and settings
        # As of the latest call from Python, or trace:
        self.contexts: list = []
        self.numbers: dict = {}  # the BatchNorm's own settings
        self.parameters: Any = weakref.WeakSet()  # of the layer
        self._parameter_ids: list = []
        self._options: tuple = ()  # those that native code has
        self._made[name] += 1
        self.shared_name, count = name, self._made[name]
        if count > 1:
            self.shared_name += f" (number {count} of that name)"
        self.key = uuid.uuid4().hex
        watch_process()
        layer = load().gluon_syncbn_create_layer(self.key, name)
        release = weakref.finalize(self, load().gluon_syncbn_release_layer, layer)
        release.atexit = False
        steps.layers[self.key] = self

    @staticmethod
    def of(key: str) -> Synchronization:
        """Return what the layer of a graph has; ValueError if the layer is gone."""
        found = steps.layers.get(key)
        if found is None:
            raise ValueError(
                "net has a SyncBatchNorm in its graph, and the layer that it was made "
                "of is gone. Call revert_sync_batchnorm before you export a net."
            )
        return found

    def __reduce__(self):  # a copy gets another key
        values = self.name, self.settings, self.activation, self.original
        return Synchronization, values

    def keep(self, is_kept: bool = True) -> None:
        """Keep the layer for a symbol that may outlive its block, or no longer."""
        (self._of_symbols.add if is_kept else self._of_symbols.discard)(self)

    def use(self, parameters: Iterable) -> None:
        """Register a call's parameters, whose trainers' steps wait from now on."""
        parameters = list(parameters)
        if self._parameter_ids != list(map(id, parameters)):
            self._parameter_ids = list(map(id, parameters))
            self.parameters = weakref.WeakSet(parameters)
            steps.guard_trainers(parameters)

    def update(self, contexts: Sequence, numbers: dict, restarts: bool = False) -> None:
        """Give native code the options that have changed.

        `numbers` are the BatchNorm's own settings. It `restarts` when no call is in
        flight.
        """
        self.contexts, self.numbers = list(contexts), dict(numbers)
        settings = self.settings
        ranks = ranks_of(settings.group, self.name)
        options = (
            " ".join(map(str, contexts)).encode(),
            self.shared_name.encode(),
            tuple(ranks),
            numbers["eps"],
            numbers["momentum"],
            settings.timeout or 0,
            self.activation.slope or 0,
            len(ranks),
            settings.num_devices or len(contexts),
            numbers["axis"],
            numbers["fix_gamma"],
            settings.unbiased_running_var,
            NONFINITE.index(settings.nonfinite),
            NAMES.index(self.activation.name),
        )
        if options != self._options:
            array = (ctypes.c_int * len(ranks))(*ranks)
            given = LayerOptions(*options[:2], array, *options[3:])
            load().gluon_syncbn_set_options(self.key, given, restarts)
            self._options = options

    def check_thread(self, contexts: Sequence) -> None:
        """Warn of a call that will wait in vain for the other CPU contexts."""
        is_main = threading.current_thread() is threading.main_thread()
        is_loop = is_main and not here.contexts and self.settings.num_devices != 1
        on_cpus = all(context.device_type == "cpu" for context in contexts)
        warned = Synchronization.has_warned
        if is_loop and on_cpus and len(contexts) > 1 and not warned:
            Synchronization.has_warned = True
            warn(
                f"SyncBatchNorm '{self.name}' is on {comma_list(contexts)}, and the "
                "main thread calls it. A loop over CPU contexts can wait until the "
                "timeout, because operators of one thread share memory. Call "
                "convert_sync_batchnorm(net) or allow_plain_loop(net) with the net "
                "that the loop calls"
            )

    def release(self) -> None:
        """Undo `use`: the layer is no SyncBatchNorm any more."""
        parameters, self.parameters = list(self.parameters), weakref.WeakSet()
        self._parameter_ids = []
        steps.release_trainers(parameters)

    def is_alone(self) -> bool:
        """Return True if it would use other processes, and none is connected."""
        return world().size == 1 and self.settings.group != "process"

    def is_connected(self) -> bool:
        """Return True if it synchronizes with other processes."""
        ranks = ranks_of(self.settings.group, self.name)
        return len(ranks or range(world().size)) > 1


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


def ranks_of(group: Any, layer: str) -> list[int]:
    """Return the ranks, ascending, that a layer of this group synchronizes with; all
    ranks if there are none in the list.
    """
    if group is None:
        return []
    if group == "process":
        return [world().rank]
    if group == "machine":
        return world().of_machine
    return _own_ranks(_groups(group), layer)


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
