"""A net on several devices that is used like a net on one.

A call splits the batch, runs the net on every device through ``Devices.map``, and
gathers the outputs; ``backward.py`` carries gradients back. It must not know what the
net computes.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any, ContextManager, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock

from ..common.arguments import (
    check_block,
    check_bool,
    check_choice,
    check_contexts,
    check_int,
    check_path,
    listed,
)
from ..devices.devices import Devices
from ..layer.batch_norm import contexts_of
from ..layer.convert import convert_sync_batchnorm
from ..layer.synchronization import NONFINITE
from ..mxnet_private.blocks import parameters_by_place
from ..mxnet_private.parameters import data_of, is_deferred, value_of
from . import backward, warn
from .batch import Batch, ShardedOutput
from .participation import participating


def make_parallel(
    net: mx.gluon.Block,
    ctx: Sequence[mx.Context],
    sync_bn: bool = True,
    batch_axis: int = 0,
    gather: bool = True,
    reset_ctx: bool = False,
    nonfinite: str = "propagate",
) -> ParallelNet:
    """Makes one net that runs on several devices out of a net for one.

    The parallel net takes whole batches and returns whole outputs, equal to those of
    `net` on one device with the whole batch (Dropout aside, which draws other numbers).
    One loss on its output back-propagates through all devices. Batches may have any
    number of rows: shards differ by one row at most, and devices that get no row are
    skipped.

    Parameters
    ----------
    net : mxnet.gluon.Block
        Initialized on `ctx`, or not at all yet, unless `reset_ctx` is set. It remains
        the net that is trained, with its parameters, their names and files.
    ctx : list of mxnet.Context
        Distinct contexts.
    sync_bn : bool, default True
        Whether every BatchNorm of `net` is made a SyncBatchNorm over `ctx`, in place.
        Without it the result of a net with BatchNorm depends on the number of devices.
    batch_axis : int, default 0
        The axis of the rows, in every input and output.
    gather : bool, default True
        Whether outputs are copied to the first context and joined. Without it
        a call returns :class:`ShardedOutput`, to be given to a
        :class:`ParallelCriterion`: the outputs stay where they are, which saves their
        memory on the first context.
    reset_ctx : bool, default False
        Whether parameters that are initialized elsewhere are moved to `ctx`. GluonCV
        makes nets of which a part is initialized already.
    nonfinite : "propagate", "skip" or "raise", default "propagate"
        As in :class:`SyncBatchNorm`, for the layers that `sync_bn` converts.

    Returns
    -------
    ParallelNet

    Raises
    ------
    ValueError
        If `ctx` is empty or names a context twice, or `net` is initialized on others
        and `reset_ctx` is not set.
    TypeError
        If `net` is no Block, or `ctx` holds something else than contexts.

    Examples
    --------
    >>> from gluon_syncbn import make_parallel
    >>> import mxnet as mx
    >>> from mxnet import autograd, gluon
    >>> net = gluon.nn.HybridSequential()
    >>> net.add(gluon.nn.Dense(4), gluon.nn.BatchNorm(), gluon.nn.Dense(1))
    >>> net = make_parallel(net, ctx=[mx.cpu(0), mx.cpu(1)])
    >>> net.initialize()
    >>> trainer = gluon.Trainer(net.collect_params(), "sgd")
    >>> x = mx.nd.random.normal(shape=(5, 3))
    >>> with autograd.record():
    ...     loss = (net(x) ** 2).mean()
    >>> loss.backward()
    >>> trainer.step(1)
    >>> net(x).shape
    (5, 1)
    """
    check_not_parallel(net, "make_parallel")
    check_int("batch_axis", batch_axis)
    check_bool("sync_bn", sync_bn)
    check_bool("gather", gather)
    check_bool("reset_ctx", reset_ctx)
    check_choice("nonfinite", nonfinite, NONFINITE)
    devices = Devices(ctx)
    if reset_ctx:
        _move(net, devices.contexts)
    parallel = ParallelNet(net, devices, batch_axis, gather)
    parallel._synchronizes = sync_bn
    if sync_bn:
        count = len(parallel.devices)
        convert_sync_batchnorm(net, num_devices=count, nonfinite=nonfinite)
    return parallel


class ParallelNet(Block):
    """A net on several devices, as :func:`make_parallel` returns it.

    It takes and returns whole batches. `backward` goes through it, also from another
    thread, and writes the gradients of parameters, and of inputs that `attach_grad` was
    called for. `autograd.grad` does not, and raises a ValueError. Threads may train a
    net each.

    Attributes that it lacks are read and set on the template, and so are its items:
    `features`, `output`, `net[0]`. When called, these run on one device.

    Attributes
    ----------
    net : mxnet.gluon.Block
        The template: the net that was made parallel.
    batch_axis : int
        The axis of the rows.
    devices : Devices
        Their threads run the net. Each thread has its own random generators:
        ``net.devices.map(lambda: mx.random.seed(0))`` seeds them.

    Examples
    --------
    >>> from gluon_syncbn import make_parallel
    >>> import mxnet as mx
    >>> net = make_parallel(mx.gluon.nn.Dense(3), ctx=[mx.cpu(0), mx.cpu(1)])
    >>> net.initialize()
    >>> net(mx.nd.ones((5, 2))).shape
    (5, 3)
    >>> net.devices
    Devices([cpu(0), cpu(1)])
    """

    def __init__(
        self,
        net: mx.gluon.Block,
        devices: Devices,
        batch_axis: int = 0,
        gather: bool = True,
    ) -> None:
        super().__init__(prefix="")
        self.devices, self.batch_axis = devices, batch_axis
        self._gather = gather
        self.net = net  # from now on attributes that it has are set on it
        self._checked, self._synchronizes = [], False
        self._check_contexts()

    def __getattr__(self, name: str) -> Any:
        """The template's attribute, for one that this net lacks."""
        template = vars(self).get("net")  # a copy has none before it is complete
        if template is None or name.startswith("_") or not hasattr(template, name):
            raise AttributeError(
                f"a ParallelNet has no attribute '{name}', and neither has its "
                f"template, the attribute net ({type(template).__name__})"
            )
        return getattr(template, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets the template's attribute of that name if it has one, else this net's."""
        template = vars(self).get("net")
        own = name.startswith("_") or hasattr(type(self), name) or name in vars(self)
        if own or not hasattr(template, name):
            super().__setattr__(name, value)
        else:
            self._checked = []
            setattr(template, name, value)

    def __getitem__(self, key: Any) -> Any:
        """The template's item."""
        if not hasattr(type(self.net), "__getitem__"):
            raise TypeError(
                f"the template of this ParallelNet, its attribute net, is a "
                f"{type(self.net).__name__}, which has no items, expected a net like "
                "HybridSequential"
            )
        return self.net[key]

    def initialize(
        self,
        init: Any = None,
        ctx: Sequence[mx.Context] | None = None,
        verbose: bool = False,
        force_reinit: bool = False,
    ) -> None:  # the arguments of Block.initialize
        """As :meth:`mxnet.gluon.Block.initialize`, on the devices of this net."""
        init = mx.init.Uniform() if init is None else init
        self.net.initialize(init, self._same(ctx), verbose, force_reinit)

    def hybridize(self, active: bool = True, **kwargs: Any) -> None:
        """As :meth:`mxnet.gluon.Block.hybridize`; call it after changing the net."""
        self._checked = []
        super().hybridize(active, **kwargs)

    def load_parameters(
        self,
        filename: str | os.PathLike,
        ctx: Sequence[mx.Context] | None = None,
        allow_missing: bool = False,
        ignore_extra: bool = False,
        cast_dtype: bool = False,
        dtype_source: str = "current",
    ) -> None:
        """As :meth:`mxnet.gluon.Block.load_parameters`, on the devices of this net."""
        filename = check_path("filename", filename)
        options = allow_missing, ignore_extra, cast_dtype, dtype_source
        self.net.load_parameters(filename, self._same(ctx), *options)

    def save_parameters(
        self, filename: str | os.PathLike, deduplicate: bool = False
    ) -> None:
        """Saves one set of parameters, which `net` and this net load.

        Waits for the work in flight; call it between steps.
        """
        filename = check_path("filename", filename)
        check_bool("deduplicate", deduplicate)
        mx.nd.waitall()
        parameters = parameters_by_place(self.net)
        if deduplicate:
            names = {p: name for name, p in parameters.items()}
            parameters = {name: p for p, name in names.items()}
        self._save(filename, parameters)

    def export(
        self, path: str | os.PathLike, epoch: int = 0, remove_amp_cast: bool = True
    ) -> None:
        """As :meth:`mxnet.gluon.HybridBlock.export`: saves the graph of `net`.

        Before it call :func:`revert_sync_batchnorm`, and this net once. Waits for the
        work in flight. The files' names are ``path-symbol.json`` and
        ``path-0000.params`` with the number of the epoch.

        Raises
        ------
        TypeError
            If `net` is no HybridBlock.
        RuntimeError
            If it is not hybridized, or was not called since.
        """
        path = check_path("path", path)
        check_int("epoch", epoch, least=0)
        check_bool("remove_amp_cast", remove_amp_cast)
        if not isinstance(self.net, HybridBlock):
            raise TypeError(
                f"export needs a gluon.HybridBlock, but the net is {type(self.net)}"
            )
        mx.nd.waitall()
        self.net.export(path, epoch, remove_amp_cast)
        filename, parameters = f"{path}-{epoch:04d}.params", self.net.collect_params()
        load = mx.npx.load if mx.util.is_np_array() else mx.nd.load
        # Each name is "arg:" or "aux:" and the name of a parameter.
        names = {name: parameters[name[4:]] for name in load(filename)}
        self._save(filename, names)

    def _save(self, filename, parameters):
        """Saves the first device's values; Gluon would average, which may round."""
        first = self.devices.contexts[0]
        arrays = {name: value_of(p, first) for name, p in parameters.items()}
        save = mx.npx.save if mx.util.is_np_array() else mx.nd.save
        save(filename, arrays)

    def summary(self, *inputs: Any) -> None:
        """As :meth:`mxnet.gluon.Block.summary`: of `net` on the first device."""
        first = self.devices.contexts[:1]
        batch = Batch(inputs, first, self.batch_axis, self._parameters())
        with first[0], autograd.pause():
            self.net.summary(*batch.shards[0])

    def forward(self, *args: Any) -> Any:
        """Calls the net on a whole batch.

        Parameters
        ----------
        *args
            Arrays (NDArray or NumPy, on any context) with equal numbers of rows, also
            nested in lists, tuples and dicts; every device gets anything else
            unchanged.

        Returns
        -------
        The net's outputs in their own nesting: whole ones on the first context, or with
        ``gather=False`` a :class:`ShardedOutput`. Arrays are joined along the batch
        axis; of anything else the first device's is returned.

        Raises
        ------
        ValueError
            If there is no array, or one without rows, or if numbers of rows differ; if
            outputs that are to be joined have other rows than the inputs, or differ
            between devices in more than rows: in structure, type, dtype or shape.
        """
        is_first = not self._checked  # since it was changed or hybridized
        contexts, parameters = self.devices.contexts, self._parameters()
        if autograd.is_recording():
            warn.of_trainer(parameters)
        batch = Batch(args, contexts, self.batch_axis, parameters)
        participants: ContextManager = nullcontext()
        # Only in training do devices wait for each other.
        if autograd.is_training() and len(batch.contexts) < len(contexts):
            participants = participating(self.net, batch.contexts)
        with participants:
            outputs = self.devices.map_first(
                lambda shard: self.net(*shard), batch.shards
            )
        if self._synchronizes and is_first:
            warn.of_operators(self.net)
        if autograd.is_training() and not self._synchronizes:
            warn.of_few_rows(self.net, batch.rows)
        if self._gather:
            return backward.gather(outputs, batch, self.devices)
        return ShardedOutput(outputs, batch, self)

    def _same(self, ctx):
        """The devices' contexts; ValueError if `ctx` names others."""
        contexts = self.devices.contexts
        if ctx is not None and set(check_contexts("ctx", ctx)) != set(contexts):
            raise ValueError(
                f"ctx is {ctx}, but this net was made parallel over {listed(contexts)}"
            )
        return contexts

    def _parameters(self):
        """The parameters, all of which are on the devices of this net."""
        count = len(self.devices)
        if not self._checked or any(len(data_of(p)) != count for p in self._checked):
            self._checked = self._check_contexts()  # as slow as pushing a small net
        return self._checked

    def _check_contexts(self):
        """The parameters; raises ValueError if one is initialized elsewhere."""
        contexts = self.devices.contexts
        parameters = self.net.collect_params()
        for name, parameter in parameters.items():
            found = contexts_of(parameter)
            if found and set(found) != set(contexts):
                raise ValueError(
                    f"parameter '{name}' is initialized on "
                    f"{listed(found)}, expected {listed(contexts)}; "
                    "make_parallel(..., reset_ctx=True) moves a net"
                )
        return list(parameters.values())

    def _collect_params_with_prefix(self, prefix=""):
        return parameters_by_place(self.net, prefix)


def check_not_parallel(net: Any, function: str) -> None:
    """Raises TypeError unless `net` is a Block that is not parallel yet."""
    if isinstance(net, ParallelNet):
        raise TypeError(
            f"net is parallel already and needs no {function}, expected a gluon.Block "
            "that make_parallel was not called with"
        )
    check_block("net", net)


def _move(net: mx.gluon.Block, contexts: Sequence[mx.Context]) -> None:
    """Moves parameters that are initialized, or will be; others have no context yet."""
    for parameter in net.collect_params().values():
        if data_of(parameter) or is_deferred(parameter):
            parameter.reset_ctx(contexts)
