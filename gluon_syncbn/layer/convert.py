"""Converts the BatchNorm layers of a net to SyncBatchNorm, and back.

It changes the class of the layers in place: so every reference to a layer (attributes,
containers, hooks, shared heads), its parameters, name and hybridization remain, and
nothing has to be registered again.
"""

from __future__ import annotations

from typing import Sequence

import mxnet as mx
from mxnet.gluon import SymbolBlock, nn

from ..common.arguments import check_block
from ..mxnet_private.blocks import (
    BatchNormBase,
    blocks_of,
    forget_graph,
    names_in,
    set_settings,
    settings_of,
)
from ..native.program import warn
from .activations import NONE, RELU, ActivatedBatchNorm
from .batch_norm import SyncBatchNorm, check_numbers
from .symbol_blocks import check_symbol_block, convert_graph, revert_graph
from .synchronization import Settings, SyncState

# MXNet 2 has it in nn.
_CONTRIB = getattr(nn, "SyncBatchNorm", None) or mx.gluon.contrib.nn.SyncBatchNorm
_RELU = getattr(nn, "BatchNormReLU", nn.BatchNorm)  # MXNet 1.8 brought it
_KNOWN = (ActivatedBatchNorm, _CONTRIB, _RELU, nn.BatchNorm, BatchNormBase)


def convert_sync_batchnorm(
    net: mx.gluon.Block,
    num_devices: int | None = None,
    *,
    unbiased_running_var: bool = False,
    timeout: float | None = None,
    group: str | Sequence | None = None,
    nonfinite: str = "propagate",
) -> mx.gluon.Block:
    """Turns every BatchNorm of a net into a SyncBatchNorm, in place.

    Works before and after initialization, on :class:`nn.BatchNorm`,
    ``nn.BatchNormReLU``, MXNet's contrib ``SyncBatchNorm`` and GluonCV's
    ``BatchNormCudnnOff``, and on the nodes of these kinds in the graph of a
    :class:`SymbolBlock`; a SyncBatchNorm takes the new settings. A subclass that
    defines more than ``__init__`` stays as it is, and so do InstanceNorm, LayerNorm and
    GroupNorm.

    Parameters
    ----------
    net : mxnet.gluon.Block
    num_devices, unbiased_running_var, timeout, group, nonfinite
        As in :class:`SyncBatchNorm`.

    Returns
    -------
    mxnet.gluon.Block
        `net` itself.

    Raises
    ------
    TypeError
        If `net` is no Block.
    TypeError, ValueError
        For a bad setting, here or in a layer of the net. The net is unchanged then.

    Warns
    -----
    UserWarning
        Once, with all that cannot be converted: layers of a subclass that has its own
        methods, and nodes of a SymbolBlock whose mean or variance is read.

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
    settings = Settings(*given).validate()
    blocks, names, left = blocks_of(net), names_in(net), []
    for block in blocks:
        _check_layer(block, names[block])
        check_symbol_block(block)
    for block in blocks:
        if isinstance(block, SymbolBlock):
            nodes = convert_graph(block, settings._asdict())
            left += [f"{name} (its mean or variance is read)" for name in nodes]
        elif isinstance(block, BatchNormBase):
            methods = ", ".join(_own_methods(block))
            if methods:
                kind = type(block).__name__
                left.append(f"{names[block]} ({kind} defines {methods})")
            else:
                _convert_layer(block)
                block._sync.synchronize(names[block], settings)
    net.apply(forget_graph)
    if left:
        warn(f"these batch normalizations stay unsynchronized: {', '.join(left)}")
    return net


def revert_sync_batchnorm(net: mx.gluon.Block) -> mx.gluon.Block:
    """Turns every SyncBatchNorm of a net into the BatchNorm that it was, in place.

    The inverse of :func:`convert_sync_batchnorm`: the net then exports, and runs where
    this package is not installed. Layers that were made as SyncBatchNorm or as MXNet's
    contrib layer become :class:`nn.BatchNorm`, or one with the activation that they
    were made with.

    Parameters
    ----------
    net : mxnet.gluon.Block

    Returns
    -------
    mxnet.gluon.Block
        `net` itself.

    Raises
    ------
    TypeError
        If `net` is no Block.

    Examples
    --------
    >>> from gluon_syncbn import convert_sync_batchnorm, revert_sync_batchnorm
    >>> from mxnet.gluon import nn
    >>> net = convert_sync_batchnorm(nn.BatchNorm())
    >>> type(revert_sync_batchnorm(net)).__name__
    'BatchNorm'
    """
    check_block("net", net)
    blocks = blocks_of(net)
    for block in blocks:
        check_symbol_block(block)
    for block in blocks:
        if isinstance(block, SymbolBlock):
            revert_graph(block, _revert_layer)
        elif type(block) is SyncBatchNorm:
            _revert_layer(block)
    net.apply(forget_graph)
    return net


def _check_layer(block, name):
    if isinstance(block, BatchNormBase) and not _own_methods(block):
        momentum, epsilon = (settings_of(block)[key] for key in ("momentum", "eps"))
        check_numbers(momentum, epsilon, f" of {name}")


def _convert_layer(block):
    """Makes a layer a SyncBatchNorm, unless it is one."""
    if isinstance(block, SyncBatchNorm):
        return
    activation = RELU if _has_relu(block) else NONE
    if isinstance(block, ActivatedBatchNorm):
        activation = vars(block).pop("_applied")
    made_with = settings_of(block)
    block._sync = SyncState((type(block), made_with), activation)
    names = "axis", "eps", "momentum", "fix_gamma", "use_global_stats"
    # contrib's layer has no axis: it is 1
    set_settings(block, {name: made_with.get(name, 1) for name in names})
    block.__class__ = SyncBatchNorm


def _revert_layer(block):
    """Makes a SyncBatchNorm the layer that it was."""
    sync = vars(block).pop("_sync")
    sync.handle.release()
    made_with = nn.BatchNorm if sync.activation.name is None else ActivatedBatchNorm
    original, former = sync.original or (made_with, {})
    if original is _CONTRIB:
        original, former = nn.BatchNorm, {}
    # Settings that changed since (GluonCV freezes statistics this way) stay.
    set_settings(block, {**former, **settings_of(block)})
    block.__class__ = original
    if original is ActivatedBatchNorm:
        block._applied = sync.activation


def _own_methods(block):
    """The methods of a layer's own class, which conversion would take away."""
    cls = type(block)
    if isinstance(block, SyncBatchNorm):
        return []
    known = next(base for base in cls.__mro__ if base in _KNOWN).__mro__
    own = {name for base in cls.__mro__ if base not in known for name in vars(base)}
    for name in {"forward", "hybrid_forward"} & vars(block).keys():
        # The parallel nets' own calls that of the class, whichever that is.
        if not getattr(vars(block)[name], "calls_class", False):
            own.add(name)
    if cls.__name__ == "BatchNormCudnnOff":  # GluonCV's: differs on cuDNN only
        own.remove("hybrid_forward")
    return sorted(n for n in own if n == "__call__" or not n.startswith("__"))


def _has_relu(block):
    return getattr(block, "fuse_relu", False)  # MXNet before 1.8 has no such layer
