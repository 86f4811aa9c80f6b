"""Convert the batch normalization of whole nets to SyncBatchNorm, revert or freeze it.

The class of a layer changes in place. So its parameters, name and hybridization stay,
and so do all references to it (attributes, containers, hooks, shared heads).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Callable, Iterator

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import nn

from ..arguments import check_block, check_bool, check_int, check_keywords, comma_list
from ..compat import IS_GLUON_2
from ..mxnet_private.blocks import (
    forget_graphs_with,
    name_of,
    set_settings,
    settings_of,
)
from ..mxnet_private.parameters import contexts_of, data_of
from ..native.failures import warn
from . import finding
from .batch_norm import SyncBatchNorm
from .finding import CONTRIB, Norm
from .synchronization import (
    ActivatedBatchNorm,
    Settings,
    Synchronization,
    check_numbers,
)

# parallel/plain_loop.py adds actions, because this module cannot import it.
after_conversion: list[Callable[[mx.gluon.Block], None]] = []
after_reverting: list[Callable[[mx.gluon.Block], None]] = []


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
    for act in after_conversion:
        act(net)
    return net


def revert_sync_batchnorm(net: mx.gluon.Block) -> mx.gluon.Block:
    """Convert every SyncBatchNorm in a net back to the original BatchNorm, in place.

    Afterwards you can export `net`, and run it where gluon_syncbn is not installed.
    Layers that were created as SyncBatchNorm, and MXNet's contrib
    layers, become :class:`nn.BatchNorm`, or a subclass that applies their activation.
    A subclass of SyncBatchNorm that defines more than ``__init__`` is not converted.

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
    found = _norms_to_change(net)
    norms = [n for n in found if isinstance(n.layer, (SyncBatchNorm, CONTRIB))]
    norms = [norm for norm in norms if not finding.own_methods(norm.layer)]
    masked = [norm.name for norm in norms if norm.is_masked and not norm.is_frozen()]
    if masked:
        raise ValueError(
            f"net must not have masks in a SymbolBlock, got {comma_list(masked)}. "
            "BatchNorm accepts no mask. To export the net, call freeze_statistics(net)."
        )
    for norm in norms:
        if not norm.is_masked:
            _revert_layer(norm.layer)
    _remake_graphs(norms)
    for act in after_reverting:
        act(net)
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
    frozen = check_bool("frozen", frozen)
    norms = _norms_to_change(net)
    mx.nd.waitall()
    changed = [norm for norm in norms if norm.layer is not None]
    for norm in changed:
        settings_of(norm.layer)["use_global_stats"] = frozen
    _remake_graphs(changed)
    verb = "freeze" if frozen else "unfreeze"
    unknown = [n for n in norms if n.layer is None or finding.own_methods(n.layer)]
    if unknown:
        warn(f"freeze_statistics perhaps did not {verb} {comma_list(unknown)}")
    elif not norms:
        warn(f"{name_of(net)} has no batch normalization to {verb}")
    return net


def convert(net: mx.gluon.Block, settings: Settings) -> list[Norm]:
    norms = _norms_to_change(net)
    _synchronize([norm for norm in norms if not norm.reason], settings)
    remaining = [norm for norm in norms if norm.reason]
    if remaining:
        warn(f"these batch normalizations stay unsynchronized: {comma_list(remaining)}")
    return norms


@contextmanager
def synchronized(net: mx.gluon.Block) -> Iterator[list[Norm]]:
    """Convert a net for a ``with`` block; yield the norms that are not frozen."""
    norms = [norm for norm in _norms_to_change(net) if not norm.is_frozen()]
    plain = [n for n in norms if not (n.reason or isinstance(n.layer, SyncBatchNorm))]
    saved = [(n.layer, type(n.layer), dict(vars(n.layer))) for n in plain]
    try:
        _synchronize(plain, Settings())
        yield norms
    finally:
        for layer, cls, attributes in saved:
            if isinstance(layer, SyncBatchNorm):
                layer._sync.kept.discard(layer._sync)
                layer._sync.release()
            layer.__class__ = cls
            vars(layer).clear()
            vars(layer).update(attributes)
        _remake_graphs(plain)


def _norms_to_change(net):
    norms = finding.norms_of(net)
    if IS_GLUON_2 and any(norm.block is not None for norm in norms):
        # finding.remake_graph calls layers with symbols, which MXNet 2 does not allow.
        raise NotImplementedError(
            "net must not have a SymbolBlock with batch normalization in MXNet 2. Use "
            "the blocks from which the graph was exported."
        )
    return norms


def _synchronize(norms, settings):
    """Convert the layers; raise errors before any layer changes."""
    for norm in norms:
        _check(norm, settings)
    if any(isinstance(norm.layer, SyncBatchNorm) for norm in norms):
        mx.nd.waitall()  # pending calls use the former settings
    _remake_graphs([norm for norm in norms if _convert_layer(norm, settings)])


def _check(norm, settings):
    made_with, where = settings_of(norm.layer), f" of {norm.name}"
    check_numbers(made_with["momentum"], made_with["eps"], where)
    # MXNet's contrib layer has no setting for the axis, which is 1.
    check_int(f"axis{where}", made_with.get("axis", 1), minimum=-5, maximum=4)
    is_known = settings.num_devices or contexts_of(norm.layer.running_mean)
    if norm.block is not None and not is_known:
        raise ValueError(
            f"num_devices must be given for {norm.name}, because its SymbolBlock is "
            "not initialized. Call net.initialize(ctx=...) first, or pass num_devices."
        )


def _remake_graphs(norms):
    for block in {norm.block: None for norm in norms if norm.block is not None}:
        finding.remake_graph(block)
    forget_graphs_with([norm.layer.running_mean for norm in norms])


def _convert_layer(norm, settings):
    """Convert a layer; return True if graphs with the layer must be remade."""
    layer = norm.layer
    _set_fixed_gamma(layer)
    settings = settings._replace(**_kept_settings(layer))
    if isinstance(layer, SyncBatchNorm):
        sync = layer._sync
        # A node of a SymbolBlock may share `sync` with the layer from which the graph
        # was exported, so it gets a new Synchronization. So does a renamed layer.
        if norm.block is None and sync.name == norm.name:
            sync.settings = settings
            sync.update(layer.contexts(), settings_of(layer), restarts=True)
            return False
        original = sync.original
    else:
        original = type(layer)
        if isinstance(layer, CONTRIB):
            original = nn.BatchNorm
            _drop_contribs_settings(layer)
        layer.__class__ = SyncBatchNorm
    layer._sync = Synchronization(norm.name, settings, original)
    return True


def _kept_settings(layer):
    if isinstance(layer, SyncBatchNorm):
        settings = layer._sync.settings
    elif isinstance(layer, ActivatedBatchNorm):
        settings = layer._activation_settings
    else:  # MXNet's own layer; 1.8 and later also have one with a ReLU
        has_relu = getattr(layer, "fuse_relu", False)
        settings = Settings(activation="relu" if has_relu else None)
    return {"activation": settings.activation, "slope": settings.slope}


def _revert_layer(layer):
    _set_fixed_gamma(layer)
    if isinstance(layer, CONTRIB):
        _drop_contribs_settings(layer)
        layer.__class__ = nn.BatchNorm
        return
    sync = vars(layer).pop("_sync")
    sync.release()
    layer.__class__ = sync.original
    if sync.original is nn.BatchNorm and sync.settings.activation is not None:
        layer.__class__, layer._activation_settings = ActivatedBatchNorm, sync.settings


def _drop_contribs_settings(layer):
    names = "eps", "momentum", "fix_gamma", "use_global_stats"
    kept = {name: settings_of(layer)[name] for name in names}
    set_settings(layer, {"axis": 1, **kept})


def _set_fixed_gamma(block):
    """Set an unused gamma to 1, because programs that load it may use it."""
    if settings_of(block)["fix_gamma"]:
        with autograd.pause():
            for data in data_of(block.gamma):
                data[:] = 1
