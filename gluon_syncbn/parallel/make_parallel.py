"""Make a single-device net run on several devices, and undo this."""

from __future__ import annotations

from functools import partial
from typing import Sequence

import mxnet as mx

from ..arguments import (
    check_block,
    check_bool,
    check_choice,
    check_contexts,
    check_int,
    check_keywords,
    comma_list,
    short_repr,
)
from ..layer.cached_ops import watch_graphs
from ..layer.finding import synchronized_layers
from ..layer.synchronization import NONFINITE, Settings
from ..mxnet_private.blocks import blocks_of, forget_graph, forget_graphs_with, name_of
from ..mxnet_private.owners import undo_replicate
from ..mxnet_private.parameters import data_of, is_deferred, move, trainer_of
from ..mxnet_private.trainers import use_replicas
from ..native.guarded_trainers import release_trainers
from .devices import Devices
from .forward import ParallelForward, is_parallel


@check_keywords
def make_parallel(
    net: mx.gluon.Block,
    ctx: Sequence[mx.Context],
    sync_bn: bool = True,
    batch_axis: int = 0,
    reset_ctx: bool = False,
    nonfinite: str = "propagate",
) -> mx.gluon.Block:
    """Run a single-device net on several devices.

    After this call `net` takes a whole batch, splits it along `batch_axis`, runs each
    shard on its device and returns the joined output. One loss and one ``backward()``
    are enough. Results equal the results of one device with the whole batch up to
    rounding, except for Dropout, which draws other numbers. Batches may have any number
    of rows: shards differ by one row at most, and devices that get no row are skipped.

    `net` is modified in place and returned. It keeps its class, children, parameters
    and parameter names. ``initialize`` and ``load_parameters`` use `ctx` by default.
    ``save_parameters`` and ``export`` save the values of the first device.
    :func:`revert_parallel` undoes the call. Another call with equal arguments returns
    `net` as it is.

    Parameters
    ----------
    net : mxnet.gluon.Block
        A net that is not yet initialized, or is initialized on `ctx` (with `reset_ctx`,
        on any contexts). A child block called directly runs on one device.
    ctx : list of mxnet.Context
        Distinct contexts, for example ``[mx.cpu(0), mx.cpu(1)]``. A single context is
        also accepted.
    sync_bn : bool, default True
        If True, turn every BatchNorm of `net` into a SyncBatchNorm over `ctx`, in
        place. A SyncBatchNorm is also synchronized over `ctx` and keeps its other
        settings. Layers that are added later are converted in the next training call.
        If False, the results of a net with BatchNorm depend on the number of devices.
    batch_axis : int, default 0
        The axis of the rows, in every argument and result.
    reset_ctx : bool, default False
        If True, move parameters that are initialized on other contexts to `ctx`. Some
        of GluonCV's nets are partly initialized when they are made.
    nonfinite : "propagate", "skip" or "raise", default "propagate"
        The setting of :class:`SyncBatchNorm` for the layers that `sync_bn` converts. A
        SyncBatchNorm keeps its own, unless this is not the default.

    Returns
    -------
    mxnet.gluon.Block
        `net` itself. Its attribute ``devices`` is the :class:`Devices` that run it.

    Raises
    ------
    ValueError
        If `ctx` is empty or contains a context twice; if `net` is initialized on other
        contexts and `reset_ctx` is False; if `net` is already parallel with other
        arguments, has a child that is parallel over other devices, or has an attribute
        ``devices``.
    TypeError
        If `net` is not a Block, or `ctx` is neither a context nor a list of them.

    Notes
    -----
    **Arguments** are arrays (NDArray or NumPy, on any context) with equal numbers of
    rows, also nested in lists, tuples and dicts. Arrays without axes are copied to
    every device. Other objects are passed to every device unchanged.

    **Results** keep their nesting. The axis `batch_axis` of every array is the batch's:
    arrays are joined along it on the first device, and ValueError is raised if a
    device's array does not have its number of rows there. Other objects are the first
    device's. ValueError is raised if they have arrays as attributes. If results are
    large, put net and loss into one Block that returns one value per row, and make that
    parallel.

    **The first device owns parameters and gradients.** ``p.data()`` and ``p.grad()``
    return its arrays, whatever the current context is. You may change them at any time.
    ``p.grad()`` is the whole batch's after ``backward``, so clipping and optimizers
    need no change. Arrays on other contexts are copies, and changes of them are lost.

    Another thread may call ``backward``. Arguments with ``attach_grad`` also get their
    gradients. ValueError is raised if the net reads an array with ``attach_grad`` that
    is not an argument, if the loss uses an array that the net computed but did not
    return, and by ``autograd.grad``.

    ``mx.random.seed`` seeds initialization and Dropout on all devices. Inside a
    function passed to ``net.devices.map``, and in the graph of a hybridized parent, the
    net runs on the device of its argument. Do not train a hybridized parent that is
    not parallel itself.

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
    check_block("net", net)
    contexts = check_contexts("ctx", ctx)
    check_int("batch_axis", batch_axis)
    check_bool("sync_bn", sync_bn)
    check_bool("reset_ctx", reset_ctx)
    check_choice("nonfinite", nonfinite, NONFINITE)
    arguments = {
        "ctx": contexts,
        "sync_bn": sync_bn,
        "batch_axis": batch_axis,
        "nonfinite": nonfinite,
    }
    if is_parallel(net):
        _check_same(net.forward.arguments, arguments)
        return net  # a cell of a notebook may run twice
    blocks = blocks_of(net)
    for child in filter(is_parallel, blocks):
        own = child.devices.contexts
        if own != contexts:
            raise ValueError(
                f"ctx of {name_of(net)} must be {comma_list(own)}, like the one of its "
                f"parallel child {name_of(child)}, got {comma_list(contexts)}. Call "
                "revert_parallel with the child, or pass the same contexts."
            )
    if hasattr(net, "devices"):
        raise ValueError(
            "net must not have an attribute 'devices', because make_parallel sets it. "
            "Rename the attribute."
        )
    if reset_ctx:
        mx.nd.waitall()  # reads do not wait for oneDNN's change of a weight's layout
        for parameter in net.collect_params().values():
            if data_of(parameter) or is_deferred(parameter):
                move(parameter, contexts)
    settings = Settings(len(contexts), nonfinite=nonfinite) if sync_bn else None
    forward = ParallelForward(net, Devices(contexts), batch_axis, settings)
    forward.arguments = arguments
    forward.adopt_parameters(blocks)
    forward.convert_layers(blocks)
    net.apply(forget_graph)
    forget_graphs_with(net.collect_params().values())  # parents' graphs
    net.initialize = partial(_initialize, net, contexts)
    net.load_parameters = partial(_load_parameters, net, contexts)
    net.summary, net.devices = forward.summary, forward.devices
    forward.install()
    watch_graphs()
    return net


def _check_same(former, arguments):
    for name, value in arguments.items():
        if value != former[name]:
            raise ValueError(
                f"{name} must be {former[name]}, as in the first call, got {value}. "
                "To change it, call revert_parallel(net) first."
            )


def revert_parallel(net: mx.gluon.Block) -> mx.gluon.Block:
    """Undo :func:`make_parallel`: a call runs on the device of its argument.

    Layers are not changed; :func:`revert_sync_batchnorm` makes them BatchNorm again.

    Parameters
    ----------
    net : mxnet.gluon.Block
        The net, which is modified in place. Its parameters keep all their contexts.

    Returns
    -------
    mxnet.gluon.Block
        `net` itself.

    Raises
    ------
    TypeError
        If `net` is not a Block.
    ValueError
        If `net` is not parallel.

    Examples
    --------
    >>> from gluon_syncbn import make_parallel, revert_parallel
    >>> import mxnet as mx
    >>> net = make_parallel(mx.gluon.nn.Dense(3), ctx=[mx.cpu(0), mx.cpu(1)])
    >>> net.initialize()
    >>> net(mx.nd.ones((5, 2))).shape
    (5, 3)
    >>> revert_parallel(net)(mx.nd.ones((5, 2), ctx=mx.cpu(1))).context
    cpu(1)
    """
    check_block("net", net)
    if not is_parallel(net):
        raise ValueError(
            f"net must be parallel, got {short_repr(net)}. Call "
            "make_parallel(net, ctx) first."
        )
    for name in ("initialize", "load_parameters", "summary", "devices"):
        delattr(net, name)
    net.forward.remove()
    parameters = list(net.collect_params().values())
    for trainer in set(filter(None, map(trainer_of, parameters))):
        use_replicas(trainer)
    for parameter in parameters:
        undo_replicate(parameter)
    release_trainers(parameters)
    layers = synchronized_layers(net)
    if layers:
        mx.nd.waitall()  # pending calls use the former settings
    for layer in layers:  # make_parallel has set their num_devices
        layer._sync.settings = layer._sync.settings._replace(num_devices=None)
    net.apply(forget_graph)
    return net


def _initialize(net, contexts, init=None, ctx=None, *args, device=None, **kwargs):
    init, places = init or mx.init.Uniform(), ctx or device or contexts
    type(net).initialize(net, init, places, *args, **kwargs)


def _load_parameters(net, contexts, filename, ctx=None, *args, device=None, **kwargs):
    places = ctx or device or contexts
    type(net).load_parameters(net, filename, places, *args, **kwargs)
