"""All that a SyncBatchNorm has beyond a BatchNorm, in one object.

Called by ``batch_norm.py``, whose layers have it, and by ``convert.py``, which gives it
to a layer and takes it away. It must not know how a layer is traced or computed.
"""

from __future__ import annotations

import collections
import uuid
import weakref
from typing import NamedTuple, Sequence

from ..common.arguments import check_bool, check_int, is_int, shown
from ..native import steps
from ..native.failures import check_timeout
from ..native.library import load
from . import groups
from .activations import NONE, Activation


class Settings(NamedTuple):
    """With whom a layer synchronizes, and how; see the arguments of SyncBatchNorm."""

    num_devices: int | None
    unbiased_running_var: bool
    timeout: float | None
    group: str | Sequence | None


class SyncState:
    """A layer's settings, its rendezvous, its activation, and what it was before."""

    def __init__(
        self, original: tuple[type, dict] | None = None, activation: Activation = NONE
    ) -> None:
        self.original = original  # the converted BatchNorm's class and settings
        self.activation = activation
        self.from_block = None  # the block that the activation was taken from

    def synchronize(self, layer: str, settings: Settings) -> None:
        """Sets with whom the layer of that name synchronizes, and how."""
        self.num_devices, self.unbiased_running_var, self.timeout, self.group = settings
        self.rendezvous = Rendezvous(layer, groups.of_contexts(self.group))
        self.latest_use = None, None  # the trace, and the operator's output in it


def checked_settings(
    num_devices: int | None,
    unbiased_running_var: bool,
    timeout: float | None,
    group: str | Sequence | None,
) -> Settings:
    """The Settings; TypeError or ValueError for a bad one."""
    if num_devices is not None:
        if not is_int(num_devices):
            raise TypeError(
                f"num_devices is an int or None, but got {shown(num_devices)}"
            )
        check_int("num_devices", num_devices, least=1, most=2**31 - 1)
    is_unbiased = check_bool("unbiased_running_var", unbiased_running_var)
    seconds = None if timeout is None else check_timeout(timeout)
    groups.check(group)
    return Settings(num_devices, is_unbiased, seconds, group)


class Rendezvous:
    """The native rendezvous of a layer's devices, alive as long as this object.

    The key is unique, unlike a block's prefix: two nets may have equal prefixes. Other
    processes know the layer by its name, and if there are several of that name, by
    which one of them was made first: a program that is the same on all ranks makes them
    in the same order.
    """

    _made = collections.Counter()

    def __init__(self, layer: str, groups: Sequence | None = None) -> None:
        self.name = layer
        self.parameters: dict = {}  # of the layer, by name
        self._groups = groups  # of contexts; None means one of all
        self._made[layer] += 1
        nth = self._made[layer]
        self.shared_name = layer if nth == 1 else f"{layer} (number {nth} of that name)"
        self.key = uuid.uuid4().hex
        library = load()
        library.gluon_syncbn_create_group(self.key.encode(), layer.encode())
        self._finalizer = weakref.finalize(
            self, library.gluon_syncbn_release_group, self.key.encode()
        )
        self._finalizer.atexit = False
        steps.layers.add(self)

    def __reduce__(self):  # a copy gets another key
        return Rendezvous, (self.name, self._groups)

    def groups(self) -> list[tuple[str, Sequence | None]]:
        """The keys of the native groups, each with its contexts; None means all.

        ForDevice in src/mxnet/attributes.cc makes the same keys.
        """
        if self._groups is None:
            return [(self.key, None)]
        return [(f"{self.key}/{i}", group) for i, group in enumerate(self._groups)]

    def batches(self) -> list[int]:
        """The batches that each of `groups` has seen."""
        return [load().gluon_syncbn_batches(key.encode()) for key, _ in self.groups()]

    def set_batches(self, batches: int) -> None:
        """Sets the batches that every one of `groups` has seen."""
        for key, _ in self.groups():
            load().gluon_syncbn_set_batches(key.encode(), batches)
