"""The options of a SyncBatchNorm, and its state in Python and in native code."""

from __future__ import annotations

import collections
import ctypes
import math
import threading
import uuid
import weakref
from typing import Any, Iterable, NamedTuple, Sequence

from mxnet.gluon import nn

from ..arguments import (
    check_bool,
    check_choice,
    check_int,
    check_real,
    comma_list,
    short_repr,
)
from ..native import guarded_trainers
from ..native.failures import watch_process
from ..native.library import Activation, LayerOptions, load
from ..native.processes import world
from ..native.program_lines import warn
from ..native.timeouts import check_timeout
from ..native.turns import here

NONFINITE = "propagate", "skip", "raise"  # native code numbers these in this order
ACTIVATIONS = None, "identity", "relu", "leaky_relu"
GROUPS = None, "machine", "process"


class Settings(NamedTuple):
    """The arguments of SyncBatchNorm that a BatchNorm does not have."""

    num_devices: int | None = None
    unbiased_running_var: bool = False
    timeout: float | None = None
    group: str | None = None
    nonfinite: str = NONFINITE[0]
    activation: str | None = None
    slope: float | None = None  # None unless the activation is "leaky_relu"

    def validate(self) -> Settings:
        """Return the settings; raise TypeError or ValueError for a wrong one."""
        if self.num_devices is not None:
            check_int("num_devices", self.num_devices, minimum=1, maximum=2**31 - 1)
        timeout = None if self.timeout is None else check_timeout(self.timeout)
        check_choice("nonfinite", self.nonfinite, NONFINITE)
        check_choice("activation", self.activation, ACTIVATIONS)
        check_choice("group", self.group, GROUPS)
        is_unbiased = check_bool("unbiased_running_var", self.unbiased_running_var)
        return self._replace(
            unbiased_running_var=is_unbiased,
            timeout=timeout,
            slope=self._checked_slope(),
        )

    def _checked_slope(self):
        is_leaky, slope = self.activation == "leaky_relu", self.slope
        if slope is None:
            return 0.01 if is_leaky else None
        if not is_leaky:
            raise ValueError(
                f"slope must be None with activation={self.activation!r}, got "
                f"{short_repr(slope)}. Only 'leaky_relu' has a slope."
            )
        expected = "a positive number"
        return check_real("slope", slope, expected, lambda v: 0 < v < math.inf)


def check_numbers(
    momentum: float, epsilon: float, place: str = ""
) -> tuple[float, float]:
    """Return momentum and epsilon as floats; errors have `place` after the name."""
    name, expected = f"momentum{place}", "a number between 0 and 1"
    momentum = check_real(name, momentum, expected, lambda v: 0 <= v <= 1)
    name, expected = f"epsilon{place}", "a finite number of at least 0"
    return momentum, check_real(name, epsilon, expected, lambda v: 0 <= v < math.inf)


def apply_activation(F: Any, z: Any, settings: Settings) -> Any:
    if settings.activation == "relu":
        return F.relu(z)
    if settings.activation == "leaky_relu":
        return F.LeakyReLU(z, act_type="leaky", slope=settings.slope)
    return z


class Synchronization:
    """The state that a SyncBatchNorm adds to a BatchNorm. It owns a native layer.

    Nodes of graphs find a layer by `key`, and other processes find it by `shared_name`,
    because names of blocks are not unique.
    """

    kept: set = set()  # objects that a graph may use after the SyncBatchNorm is deleted
    has_warned = False  # the warning about loops over CPU contexts is given once
    _made = collections.Counter()  # the number of layers that were made with each name

    def __init__(
        self, name: str, settings: Settings, original: type = nn.BatchNorm
    ) -> None:
        self.name, self.settings = name, settings
        self.original = original  # the class that reverting restores
        self.contexts: list = []
        self.norm_settings: dict = {}  # the settings of a BatchNorm
        self.parameters: Any = weakref.WeakSet()
        self._options: tuple = ()  # that native code has
        self._made[name] += 1
        self.shared_name, count = name, self._made[name]
        if count > 1:
            self.shared_name += f" (number {count} of this name)"
        self.key = uuid.uuid4().hex
        watch_process()
        layer = load().gluon_syncbn_create_layer(self.key, name)
        release = weakref.finalize(self, load().gluon_syncbn_release_layer, layer)
        release.atexit = False
        guarded_trainers.layers[self.key] = self

    def __reduce__(self):  # a copy gets another key
        return Synchronization, (self.name, self.settings, self.original)

    def register(self, parameters: Iterable) -> None:
        """Make trainers of the parameters wait for exchanges of this layer."""
        parameters = list(parameters)
        if not self.parameters.issuperset(parameters):
            self.parameters = weakref.WeakSet(parameters)
            guarded_trainers.guard_trainers(parameters)

    def update(
        self, contexts: Sequence, norm_settings: dict, restarts: bool = False
    ) -> None:
        """Pass all options to native code if one of them has changed.

        A change with `restarts` also makes the layer forget its devices, so the caller
        must first wait for all calls.
        """
        watch_process()
        self.contexts, self.norm_settings = list(contexts), dict(norm_settings)
        ranks, name = _ranks_of(self.settings.group), self.shared_name
        options = self.contexts, self.norm_settings, self.settings, ranks, name
        if options != self._options:
            names = " ".join(map(str, contexts))
            array = (ctypes.c_int * len(ranks))(*ranks)
            others = names, array, len(ranks), name, restarts
            load().gluon_syncbn_set_options(self.key, self._native_options(), *others)
            self._options = options

    def _native_options(self):
        """Return the options that native code gets as numbers."""
        settings, norm_settings = self.settings, self.norm_settings
        is_leaky = settings.activation in ("relu", "leaky_relu")  # else the identity
        return LayerOptions(
            activation=Activation(is_leaky, settings.slope or 0),
            epsilon=norm_settings["eps"],
            momentum=norm_settings["momentum"],
            timeout=settings.timeout or 0,
            num_devices=settings.num_devices or len(self.contexts),
            axis=norm_settings["axis"],
            fix_gamma=norm_settings["fix_gamma"],
            unbiased_running_var=settings.unbiased_running_var,
            nonfinite=NONFINITE.index(settings.nonfinite),
            # These have an inverse, so backward can read y, and MXNet can free x.
            from_output=settings.activation in ("identity", "leaky_relu"),
        )

    def shared_settings(self) -> dict:
        """Return the settings in use that must be equal on all ranks."""
        settings = self.settings._asdict()
        del settings["num_devices"], settings["timeout"]
        return {**self.norm_settings, **settings}

    def share_as(self, shared_name: str) -> None:
        """Set the name by which other processes find the layer."""
        self.shared_name = shared_name
        if self.norm_settings:
            self.update(self.contexts, self.norm_settings)

    def warn_of_plain_loop(self, contexts: Sequence) -> None:
        """Warn once if the main thread calls a layer of several CPU contexts."""
        if Synchronization.has_warned or here.contexts or len(contexts) < 2:
            return
        is_main = threading.current_thread() is threading.main_thread()
        on_cpus = all(context.device_type == "cpu" for context in contexts)
        if is_main and on_cpus and self.settings.num_devices != 1:
            Synchronization.has_warned = True
            warn(
                f"SyncBatchNorm '{self.name}' is on {comma_list(contexts)}, and the "
                "main thread calls it, so it can wait for another context until the "
                "timeout. In a loop over contexts, call allow_plain_loop(net) with the "
                "net that the loop calls. If the layer belongs to a parallel net, call "
                "that net, or call make_parallel with the block that you call"
            )

    def release(self) -> None:
        """Undo `register` when the layer stops being a SyncBatchNorm."""
        parameters, self.parameters = self.parameters, weakref.WeakSet()
        guarded_trainers.release_trainers(parameters)

    def lacks_processes(self) -> bool:
        """Return True if `group` is not "process" and no other process is connected."""
        return world().size == 1 and self.settings.group != "process"

    def is_connected(self) -> bool:
        """Return True if `group` has other connected processes."""
        ranks = _ranks_of(self.settings.group)
        return len(ranks or range(world().size)) > 1


def _ranks_of(group):
    """Return the ranks that a group synchronizes, ascending; none stands for all."""
    if group is None:
        return []
    return [world().rank] if group == "process" else world().of_machine
