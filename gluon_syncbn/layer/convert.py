"""Turn the layers of a net into SyncBatchNorm, turn them back, or freeze them.

The class of a layer changes in place. So its parameters, name and hybridization stay,
and so do all references to it (attributes, containers, hooks, shared heads).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import nn

from ..arguments import check_int, comma_list
from ..mxnet_private.blocks import (
    CALLS_WITH_SYMBOLS,
    forget_graphs_with,
    set_settings,
    settings_of,
)
from ..mxnet_private.parameters import contexts_of, data_of
from ..native.program_lines import warn
from .batch_norm import ActivatedBatchNorm, SyncBatchNorm
from .finding import norms_of
from .norm_kinds import CONTRIB, Norm, own_methods
from .symbol_blocks import remake_graph
from .synchronization import Settings, Synchronization, check_numbers


def convert(
    net: mx.gluon.Block, settings: Settings, keeps_own: bool = False
) -> list[Norm]:
    """Convert all norms that can be converted; return all norms.

    If `keeps_own`, a SyncBatchNorm keeps its setting where `settings` has the default.
    """
    norms = _norms_to_change(net)
    _synchronize([norm for norm in norms if not norm.reason], settings, keeps_own)
    remaining = [norm for norm in norms if norm.reason]
    if remaining:
        warn(f"these batch normalizations stay unsynchronized: {comma_list(remaining)}")
    return norms


def revert(net: mx.gluon.Block) -> None:
    found = _norms_to_change(net)
    norms = [n for n in found if isinstance(n.layer, (SyncBatchNorm, CONTRIB))]
    norms = [norm for norm in norms if not own_methods(norm.layer)]
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


def freeze(net: mx.gluon.Block, frozen: bool) -> list[Norm]:
    """Freeze or unfreeze all norms that are layers; return all norms."""
    norms = _norms_to_change(net)
    mx.nd.waitall()
    changed = [norm for norm in norms if norm.layer is not None]
    for norm in changed:
        settings_of(norm.layer)["use_global_stats"] = frozen
    _remake_graphs(changed)
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
    norms = norms_of(net)
    # `remake_graph` calls layers with symbols.
    if not CALLS_WITH_SYMBOLS and any(norm.block is not None for norm in norms):
        raise NotImplementedError(
            "net must not have a SymbolBlock with batch normalization in MXNet 2. Use "
            "the blocks from which the graph was exported."
        )
    return norms


def _synchronize(norms, settings, keeps_own=False):
    """Convert the layers; raise errors before any layer changes."""
    for norm in norms:
        _check(norm, settings)
    if any(isinstance(norm.layer, SyncBatchNorm) for norm in norms):
        mx.nd.waitall()  # pending calls use the former settings
    pairs = [(norm, _new_settings(norm.layer, settings, keeps_own)) for norm in norms]
    _remake_graphs([norm for norm, own in pairs if _convert_layer(norm, own)])


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
        remake_graph(block)
    forget_graphs_with([norm.layer.running_mean for norm in norms])


def _convert_layer(norm, settings):
    """Convert a layer; return True if graphs with the layer must be remade."""
    layer = norm.layer
    _set_fixed_gamma(layer)
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


def _new_settings(layer, settings, keeps_own):
    """Return the settings of a layer after its conversion."""
    if isinstance(layer, SyncBatchNorm):
        former = layer._sync.settings
        if keeps_own:
            pairs = zip(Settings._fields, settings, Settings())
            given = {name: value for name, value, default in pairs if value != default}
            return former._replace(**given)
    elif isinstance(layer, ActivatedBatchNorm):
        former = layer._activation_settings
    else:  # MXNet's own layer; 1.8 and later also have one with a ReLU
        has_relu = getattr(layer, "fuse_relu", False)
        former = Settings(activation="relu" if has_relu else None)
    return settings._replace(activation=former.activation, slope=former.slope)


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
