"""Converts the BatchNorm layers of a net to SyncBatchNorm, and back.

Called by users. It changes the class of the layers in place: so every reference to a
layer (attributes, containers, hooks, shared heads), its parameters, name and
hybridization remain, and nothing has to be registered again.
"""

from __future__ import annotations

import warnings
from typing import Sequence

import mxnet as mx
from mxnet.gluon import SymbolBlock, nn

from ..common.arguments import check_block, check_bool
from ..mxnet_private.blocks import forget_graph, set_settings, settings_of
from .activations import NONE, RELU, ActivatedBatchNorm
from .batch_norm import SyncBatchNorm, check_numbers
from .fusion import check_can_unfold, find_pairs, fold, unfold
from .symbol_blocks import convert_graph, revert_graph
from .synchronization import SyncState, checked_settings

_CONTRIB = mx.gluon.contrib.nn.SyncBatchNorm
# The class that BatchNorm's forward is written in: since MXNet 1.8 a base that it
# shares with BatchNormReLU, before that BatchNorm itself.
_BASE = next(kind for kind in nn.BatchNorm.__mro__ if "hybrid_forward" in vars(kind))
_OWN_FORWARD = (_BASE.hybrid_forward, _CONTRIB.hybrid_forward)


def convert_sync_batchnorm(
    net: mx.gluon.Block,
    num_devices: int | None = None,
    *,
    unbiased_running_var: bool = False,
    timeout: float | None = None,
    group: str | Sequence | None = None,
    fuse: bool = False,
) -> mx.gluon.Block:
    """Turns every BatchNorm of a net into a SyncBatchNorm, in place.

    Works before and after initialization, on :class:`nn.BatchNorm`,
    ``nn.BatchNormReLU``, MXNet's contrib ``SyncBatchNorm`` and GluonCV's
    ``BatchNormCudnnOff``, and on the nodes of these kinds in the graph of a
    :class:`SymbolBlock`; a SyncBatchNorm takes the new settings. InstanceNorm,
    LayerNorm and GroupNorm are unchanged.

    Parameters
    ----------
    net : mxnet.gluon.Block
    num_devices, unbiased_running_var, timeout, group
        As in :class:`SyncBatchNorm`.
    fuse : bool, default False
        Whether layers do the work of a following ReLU, LeakyReLU or ELU block, where
        nothing else in `net` reads the layer's output and the block has no other input.
        The block stays in its place and returns its input, so names and indices do not
        change; hooks on the layer see the activated value. Such blocks are found by
        tracing the net as a function of one array. Saves memory for LeakyReLU, see
        `activation` of :class:`SyncBatchNorm`.

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
        For what cannot be converted: a BatchNorm with another forward, and nodes
        of a SymbolBlock whose mean or variance is read. With `fuse`, for parts that
        cannot be traced.

    Examples
    --------
    >>> from mxnet.gluon import nn
    >>> from gluon_syncbn import convert_sync_batchnorm
    >>> net = nn.HybridSequential()
    >>> net.add(nn.Dense(4), nn.BatchNorm(), nn.Activation("relu"))
    >>> net = convert_sync_batchnorm(net, num_devices=2)
    >>> type(net[1]).__name__, net[1].num_devices
    ('SyncBatchNorm', 2)
    """
    check_block("net", net)
    settings = checked_settings(num_devices, unbiased_running_var, timeout, group)
    check_bool("fuse", fuse)

    def convert(block):
        if isinstance(block, SymbolBlock):
            left = convert_graph(block, settings._asdict())
            if left:
                warnings.warn(
                    f"{', '.join(left)} in the graph of {block.name} stay "
                    "unsynchronized: their mean or variance is read too, expected "
                    "BatchNorm of which only the normalized values are",
                    stacklevel=3,
                )
        if not _is_convertible(block):
            return
        if not isinstance(block, SyncBatchNorm):
            activation = RELU if _has_relu(block) else NONE
            if isinstance(block, ActivatedBatchNorm):
                activation = vars(block).pop("_applied")
            made_with = settings_of(block)
            block._sync = SyncState((type(block), made_with), activation)
            names = "axis", "eps", "momentum", "fix_gamma", "use_global_stats"
            # contrib's layer has no axis: it is 1
            set_settings(block, {name: made_with.get(name, 1) for name in names})
            block.__class__ = SyncBatchNorm
        block._sync.synchronize(block.name, settings)

    net.apply(_check_layer)
    pairs = find_pairs(net, _can_take_activation) if fuse else []
    net.apply(convert)
    for layer, block in pairs:
        fold(layer, block)
    net.apply(forget_graph)
    return net


def revert_sync_batchnorm(net: mx.gluon.Block) -> mx.gluon.Block:
    """Turns every SyncBatchNorm of a net into the BatchNorm that it was, in place.

    The inverse of :func:`convert_sync_batchnorm`: the net then exports, and runs where
    this package is not installed. Layers that were made as SyncBatchNorm or as MXNet's
    contrib layer become :class:`nn.BatchNorm`, or one with the activation that they
    were made with; ``momentum=None``, which that does not know, becomes 0.9.
    Blocks that ``fuse=True`` has folded do their work again.

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
    ValueError
        If a layer in `net` was fused with an activation block outside of it. Nothing is
        changed then.

    Examples
    --------
    >>> from mxnet.gluon import nn
    >>> from gluon_syncbn import convert_sync_batchnorm, revert_sync_batchnorm
    >>> net = convert_sync_batchnorm(nn.BatchNorm())
    >>> type(revert_sync_batchnorm(net)).__name__
    'BatchNorm'
    """
    check_block("net", net)
    check_can_unfold(net)

    def revert(block):
        if isinstance(block, SymbolBlock):
            revert_graph(block, revert)
        if type(block) is not SyncBatchNorm:
            return
        unfold(block)
        sync = vars(block).pop("_sync")
        made_with = nn.BatchNorm if sync.activation.name is None else ActivatedBatchNorm
        original, former = sync.original or (made_with, {})
        if original is _CONTRIB:
            original, former = nn.BatchNorm, {}
        # Settings that changed since (GluonCV freezes statistics this way) stay.
        settings = {**former, **settings_of(block)}
        if settings["momentum"] is None:
            settings["momentum"] = 0.9
        set_settings(block, settings)
        block.__class__ = original
        if original is ActivatedBatchNorm:
            block._applied = sync.activation

    net.apply(revert)
    net.apply(forget_graph)
    return net


def _check_layer(block):
    if isinstance(block, _BASE) and _is_known(type(block)):
        momentum, epsilon = (settings_of(block)[name] for name in ("momentum", "eps"))
        check_numbers(momentum, epsilon, f" of {block.name}")


def _is_known(kind):
    return (
        kind in (SyncBatchNorm, ActivatedBatchNorm)
        or kind.hybrid_forward in _OWN_FORWARD
        or kind.__name__ == "BatchNormCudnnOff"  # GluonCV's: differs on cuDNN only
    )


def _is_convertible(block):
    kind = type(block)
    is_known = isinstance(block, _BASE) and _is_known(kind)
    if isinstance(block, _BASE) and not is_known:
        warnings.warn(
            f"{block.name} stays unsynchronized: {kind.__module__}.{kind.__name__} has "
            "another forward than mxnet.gluon.nn.BatchNorm",
            stacklevel=4,
        )
    return is_known


def _can_take_activation(block):
    if not isinstance(block, _BASE) or isinstance(block, ActivatedBatchNorm):
        return False
    if isinstance(block, SyncBatchNorm):
        return block.activation is None
    return not _has_relu(block) and _is_known(type(block))


def _has_relu(block):
    return getattr(block, "fuse_relu", False)  # MXNet before 1.8 has no such layer
