"""A net on several devices that is used like a net on one.

``forward.py`` runs it. It must not know what the net computes.
"""

from __future__ import annotations

from functools import partial
from typing import Sequence

import mxnet as mx

from ..arguments import (
    check_block,
    check_bool,
    check_choice,
    check_int,
    short_repr,
)
from ..devices.devices import Devices
from ..layer.synchronization import NONFINITE, Settings
from ..mxnet_private.blocks import forget_graph, replace_forward
from ..mxnet_private.parameters import data_of, is_deferred, move, trainer_set
from ..mxnet_private.trainers import share_states
from . import replicas
from .forward import ParallelForward, check_not_parallel, is_parallel


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
    are enough. Results equal those of one device with the whole batch up to rounding,
    except for Dropout, which draws other numbers. Batches may have any number of rows:
    shards differ by one row at most, and devices that get no row are skipped.

    `net` is modified in place and returned. It keeps its class, children, parameters,
    their names and files. Its ``initialize`` and ``load_parameters`` use its devices if
    no ``ctx`` is given, and files get the values of the first device.
    :func:`revert_parallel` undoes the call. Another call with the same `ctx` returns
    `net` as it is.

    Parameters
    ----------
    net : mxnet.gluon.Block
        Initialized on `ctx`, or not at all yet, unless `reset_ctx` is set. A child
        block that is called directly runs on one device.
    ctx : list of mxnet.Context
        Distinct contexts.
    sync_bn : bool, default True
        Whether every BatchNorm of `net` is made a SyncBatchNorm over `ctx`, in place,
        now and in later training calls. Without it the result of a net with BatchNorm
        depends on the number of devices.
    batch_axis : int, default 0
        The axis of the rows, in every argument and result.
    reset_ctx : bool, default False
        Whether parameters that are initialized elsewhere are moved to `ctx`. GluonCV
        makes nets of which a part is initialized already.
    nonfinite : "propagate", "skip" or "raise", default "propagate"
        As in :class:`SyncBatchNorm`, for the layers that `sync_bn` converts.

    Returns
    -------
    mxnet.gluon.Block
        `net` itself. Its attribute ``devices`` is the :class:`Devices` that run it.

    Raises
    ------
    ValueError
        If `ctx` is empty or names a context twice, or `net` is initialized on others
        and `reset_ctx` is not set; if `net` is parallel over other devices, or has an
        attribute ``devices`` of its own.
    TypeError
        If `net` is no Block, or `ctx` holds something else than contexts.

    Notes
    -----
    Arguments are arrays (NDArray or NumPy, on any context) with equal numbers of rows,
    also nested in lists, tuples and dicts. Arrays without axes are copied to every
    device; anything else is passed to every device unchanged. Results keep their
    nesting. Arrays are joined along `batch_axis` on the first device; of anything else
    the first device's is returned. Where results are large, make a Block parallel that
    holds net and loss, and returns one value a row.

    A result without rows raises ValueError. A length alone cannot show this where all
    devices have equally many rows: then the first call of its kind runs the net once
    more, on two or three rows and the first device, without a lasting effect on running
    statistics.

    ``backward`` may be called by another thread. It leaves the gradient of the whole
    batch on every device, so that clipping and optimizers need no change. It also
    writes the gradients of arguments that ``attach_grad`` was called for. Other arrays
    with a gradient that the net reads, and losses that depend on arrays that the net
    computes but does not return, raise ValueError, and so does ``autograd.grad``.
    ``mx.random.seed`` decides initialization and Dropout on all devices.

    Inside a function of ``net.devices.map``, and in the graph of a hybridized parent,
    the net runs on the one device whose array it gets.

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
    if is_parallel(check_block("net", net)) and net.devices.contexts == list(ctx):
        return net  # as a cell of a notebook that is run twice
    check_not_parallel(net, "make_parallel")
    check_int("batch_axis", batch_axis)
    check_bool("sync_bn", sync_bn)
    check_bool("reset_ctx", reset_ctx)
    check_choice("nonfinite", nonfinite, NONFINITE)
    devices = Devices(ctx)
    if hasattr(net, "devices"):
        raise ValueError(
            "net has an attribute 'devices' of its own, expected none: make_parallel "
            "sets it"
        )
    if reset_ctx:
        _move(net, devices.contexts)
    settings = Settings(len(devices), nonfinite=nonfinite)
    forward = ParallelForward(net, devices, batch_axis, settings if sync_bn else None)
    forward.parameters()
    forward.convert_layers()
    net.apply(forget_graph)
    net.initialize = partial(_initialize, net, devices.contexts)
    net.load_parameters = partial(_load_parameters, net, devices.contexts)
    net.summary = forward.summary
    net.devices = devices
    replace_forward(net, forward)
    return net


def revert_parallel(net: mx.gluon.Block) -> mx.gluon.Block:
    """Undoes :func:`make_parallel`: a call runs on the device whose array it gets.

    Layers stay as they are; :func:`revert_sync_batchnorm` makes them BatchNorm again.

    Parameters
    ----------
    net : mxnet.gluon.Block
        It is changed in place. Parameters stay on all devices.

    Returns
    -------
    mxnet.gluon.Block
        `net` itself.

    Raises
    ------
    TypeError
        If `net` is no Block.
    ValueError
        If it is not parallel.

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
            f"net is one that make_parallel was called with, but got {short_repr(net)}"
        )
    for name in ("initialize", "load_parameters", "summary", "devices"):
        delattr(net, name)
    net.forward.remove()
    parameters = list(net.collect_params().values())
    for trainer in set(filter(None, map(trainer_set, parameters))):
        share_states(trainer)
    for parameter in parameters:
        replicas.release(parameter)
    net.apply(forget_graph)
    return net


def _initialize(net, contexts, init=None, ctx=None, *args, device=None, **kwargs):
    init = mx.init.Uniform() if init is None else init
    type(net).initialize(net, init, _first(ctx, device, contexts), *args, **kwargs)


def _load_parameters(net, contexts, filename, ctx=None, *args, device=None, **kwargs):
    places = _first(ctx, device, contexts)
    type(net).load_parameters(net, filename, places, *args, **kwargs)


def _first(*values):
    return next(value for value in values if value is not None)


def _move(net: mx.gluon.Block, contexts: Sequence[mx.Context]) -> None:
    """Moves parameters that are initialized, or will be; others have no context yet."""
    mx.nd.waitall()  # MXNet may still change a weight's layout, which no read waits for
    for parameter in net.collect_params().values():
        if data_of(parameter) or is_deferred(parameter):
            move(parameter, contexts)
