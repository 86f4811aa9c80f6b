"""Convert the batch normalization of whole nets to SyncBatchNorm, revert or freeze it.

The layers change in layer/convert.py. A converted net may also be called in a plain
loop over contexts, see parallel/plain_loop.py.
"""

from __future__ import annotations

import mxnet as mx

from .arguments import check_block, check_bool, check_keywords, comma_list
from .layer.convert import convert, freeze, revert
from .layer.norm_kinds import own_methods
from .layer.synchronization import Settings
from .mxnet_private.blocks import name_of
from .native.program_lines import warn
from .parallel.forward import is_parallel
from .parallel.plain_loop import run_in_threads, stop_threads


@check_keywords
def convert_sync_batchnorm(
    net: mx.gluon.Block,
    num_devices: int | None = None,
    *,
    unbiased_running_var: bool = False,
    timeout: float | None = None,
    group: str | None = None,
    nonfinite: str = "propagate",
) -> mx.gluon.Block:
    """Convert every BatchNorm in a net to SyncBatchNorm, in place.

    It converts :class:`nn.BatchNorm`, ``nn.BatchNormReLU``, MXNet's contrib
    ``SyncBatchNorm``, GluonCV's ``BatchNormCudnnOff``, and nodes of these kinds in the
    graph of a :class:`SymbolBlock`. A subclass of these layers is converted only if it
    defines nothing but ``__init__``. An existing SyncBatchNorm gets the new settings.
    Every hybridized block whose graph contains a converted layer is traced again, also
    blocks that contain `net`.

    Afterwards the main thread may call `net` in a plain loop over several CPU contexts,
    as after :func:`allow_plain_loop`.

    Parameters
    ----------
    net : mxnet.gluon.Block
        The net, before or after its initialization. A SymbolBlock that is not
        initialized needs `num_devices`.
    num_devices, unbiased_running_var, timeout, group, nonfinite
        As in :class:`SyncBatchNorm`.

    Returns
    -------
    mxnet.gluon.Block
        `net` itself.

    Raises
    ------
    TypeError, ValueError
        If an argument or a setting of a layer is wrong. Then the net is unchanged.

    Warns
    -----
    UserWarning
        If the net has no batch normalization. Another warning lists what cannot be
        converted: a subclass that defines more than ``__init__``; a node of a
        SymbolBlock if the graph reads its mean or variance, or computes its parameters;
        and running statistics without a layer, as in a block that calls F.BatchNorm.

    Notes
    -----
    gamma is set to 1 in layers with ``scale=False``, as training in MXNet does.

    Examples
    --------
    >>> from gluon_syncbn import convert_sync_batchnorm
    >>> from mxnet.gluon import nn
    >>> net = nn.HybridSequential()
    >>> net.add(nn.Dense(4), nn.BatchNorm(), nn.Activation("relu"))
    >>> net = convert_sync_batchnorm(net, num_devices=2)
    >>> type(net[1]).__name__, net[1].num_devices
    ('SyncBatchNorm', 2)
    """
    check_block("net", net)
    given = num_devices, unbiased_running_var, timeout, group, nonfinite
    if not convert(net, Settings(*given).validate()):
        warn(f"{name_of(net)} has no batch normalization to convert")
    if not is_parallel(net):
        run_in_threads(net)
    return net


def revert_sync_batchnorm(net: mx.gluon.Block) -> mx.gluon.Block:
    """Convert every SyncBatchNorm in a net back to the original BatchNorm, in place.

    Afterwards you can export `net`, and run it where gluon_syncbn is not installed.
    Layers that were created as SyncBatchNorm, and MXNet's contrib layers, become
    :class:`nn.BatchNorm`, or a subclass that applies their activation. A subclass of
    SyncBatchNorm that defines more than ``__init__`` is not converted.

    Parameters
    ----------
    net : mxnet.gluon.Block
        A net, a child block or a SymbolBlock, parallel or not.

    Returns
    -------
    mxnet.gluon.Block
        `net` itself.

    Raises
    ------
    ValueError
        If a SymbolBlock in `net` normalizes with a mask, which BatchNorm does not
        accept. The net is unchanged then.
    TypeError
        If `net` is not a Block.

    Examples
    --------
    >>> from gluon_syncbn import convert_sync_batchnorm, revert_sync_batchnorm
    >>> from mxnet.gluon import nn
    >>> net = convert_sync_batchnorm(nn.BatchNorm())
    >>> type(revert_sync_batchnorm(net)).__name__
    'BatchNorm'
    """
    check_block("net", net)
    revert(net)
    stop_threads(net)
    return net


def freeze_statistics(net: mx.gluon.Block, frozen: bool = True) -> mx.gluon.Block:
    """Freeze or unfreeze the running statistics of every batch normalization in a net.

    A frozen layer normalizes with its running statistics in training also, and does not
    update them. gamma and beta still train. In a graph the layer is MXNet's own
    BatchNorm, so it waits for no other device and can be exported. `net` is changed in
    place and returned.

    Parameters
    ----------
    net : mxnet.gluon.Block
        A net or a child block, before or after its first call, converted or not,
        parallel, hybridized, or a SymbolBlock. Every hybridized block whose graph
        contains one of the layers is traced again.
    frozen : bool, default True
        False unfreezes all layers, also if they were made with
        ``use_global_stats=True``.

    Warns
    -----
    UserWarning
        If there is nothing to freeze. Another warning lists what perhaps did not
        change: layers whose class defines more than ``__init__``, and running
        statistics of no layer, as in a block that calls F.BatchNorm.

    Raises
    ------
    TypeError
        If `net` is not a Block, or `frozen` is not a bool.

    Notes
    -----
    Call it between steps, because it waits for pending work. With several processes
    call it on all ranks. Otherwise the other ranks wait for the frozen layers and raise
    an error after the timeout.

    Examples
    --------
    >>> from gluon_syncbn import freeze_statistics
    >>> import mxnet as mx
    >>> layer = freeze_statistics(mx.gluon.nn.BatchNorm())
    >>> layer.initialize()
    >>> with mx.autograd.record():
    ...     y = layer(mx.nd.ones((6, 2)))
    >>> layer.running_mean.data().asnumpy().tolist()
    [0.0, 0.0]
    """
    check_block("net", net)
    norms = freeze(net, check_bool("frozen", frozen))
    verb = "freeze" if frozen else "unfreeze"
    unknown = [n for n in norms if n.layer is None or own_methods(n.layer)]
    if unknown:
        warn(f"freeze_statistics perhaps did not {verb} {comma_list(unknown)}")
    elif not norms:
        warn(f"{name_of(net)} has no batch normalization to {verb}")
    return net
