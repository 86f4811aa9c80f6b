"""Changes the batch normalization of whole nets: synchronized, back again, or frozen.

The class of the layers changes in place: so every reference to a layer (attributes,
containers, hooks, shared heads), its parameters, name and hybridization remain, and
nothing has to be registered again.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Callable, Iterable, Iterator, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import nn

from ..common.arguments import check_block, check_bool, check_int, comma_list
from ..common.mxnet_version import IS_GLUON_2
from ..mxnet_private.blocks import (
    forget_graphs_with,
    name_of,
    set_settings,
    settings_of,
)
from ..mxnet_private.parameters import contexts_of, data_of
from ..native.failures import warn
from .activations import NONE, RELU, ActivatedBatchNorm
from .batch_norm import SyncBatchNorm, check_numbers
from .finding import CONTRIB, Norm, norms_of, own_methods, remake_graph, strangers_to
from .synchronization import Settings, Synchronization, ranks_of

# Further actions on a net. parallel/plain_loop.py, which is above this file, adds them.
after_conversion: list[Callable[[mx.gluon.Block], None]] = []
after_reverting: list[Callable[[mx.gluon.Block], None]] = []


def convert_sync_batchnorm(
    net: mx.gluon.Block,
    num_devices: int | None = None,
    *,
    unbiased_running_var: bool = False,
    timeout: float | None = None,
    group: str | Sequence | None = None,
    nonfinite: str = "propagate",
) -> mx.gluon.Block:
    """Turn every BatchNorm of a net into a SyncBatchNorm, in place.

    Works on :class:`nn.BatchNorm`, ``nn.BatchNormReLU``, MXNet's contrib
    ``SyncBatchNorm`` and GluonCV's ``BatchNormCudnnOff``, and on the nodes of these
    kinds in the graph of a :class:`SymbolBlock`; a SyncBatchNorm takes the new
    settings. A subclass that defines more than ``__init__`` stays as it is, and so do
    InstanceNorm, LayerNorm and GroupNorm. Every hybridized block that has one of the
    layers in its graph traces it again, also where `net` is a part of that block.

    Afterwards the main thread may call `net` in a plain loop over several CPU contexts,
    as after :func:`allow_plain_loop`.

    Parameters
    ----------
    net : mxnet.gluon.Block
        Before or after initialization. A SymbolBlock that is not initialized needs
        `num_devices`.
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
        methods, nodes of a SymbolBlock whose mean or variance is read or whose
        parameters are computed, and running statistics that no layer has, because a
        block calls F.BatchNorm or has layers in a list. Also if there is nothing to
        convert.

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
    """Turn every SyncBatchNorm of a net into the BatchNorm that it was, in place.

    The inverse of :func:`convert_sync_batchnorm`: the net then exports, and runs where
    this package is not installed. Layers that were made as SyncBatchNorm, and MXNet's
    contrib layers, become :class:`nn.BatchNorm`, or one with the activation that they
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
    ValueError
        If a SymbolBlock in `net` normalizes with a mask, which BatchNorm does not take.
        The net is unchanged then.

    Examples
    --------
    >>> from gluon_syncbn import convert_sync_batchnorm, revert_sync_batchnorm
    >>> from mxnet.gluon import nn
    >>> net = convert_sync_batchnorm(nn.BatchNorm())
    >>> type(revert_sync_batchnorm(net)).__name__
    'BatchNorm'
    """
    check_block("net", net)
    kinds = SyncBatchNorm, CONTRIB
    norms = [norm for norm in _norms_to_change(net) if type(norm.layer) in kinds]
    # A frozen node is MXNet's own already.
    masked = [norm.name for norm in norms if norm.is_masked and not norm.is_frozen()]
    if masked:
        raise ValueError(
            f"{comma_list(masked)} in a SymbolBlock cannot be reverted, because "
            "BatchNorm takes no mask. Call freeze_statistics(net) to export the net: "
            "frozen layers are MXNet's own BatchNorm."
        )
    for norm in norms:
        if not norm.is_masked:
            _revert_layer(norm.layer)
    _apply(norms)
    for act in after_reverting:
        act(net)
    return net


def freeze_statistics(net: mx.gluon.Block, frozen: bool = True) -> mx.gluon.Block:
    """Fix the running statistics of every batch normalization of a net, or thaw them.

    A frozen layer normalizes with its running statistics in training as well, and no
    longer updates them. gamma and beta still train. It is MXNet's own BatchNorm in the
    graph: it waits for no other device, and exports as it is.

    Parameters
    ----------
    net : mxnet.gluon.Block
        A net or a part of one, before or after its first call, converted or not,
        parallel, hybridized, or a SymbolBlock. Every hybridized block that has one of
        the layers in its graph traces it again.
    frozen : bool, default True
        False lets all layers train again, also those that were made with
        ``use_global_stats=True``.

    Returns
    -------
    mxnet.gluon.Block
        `net` itself.

    Raises
    ------
    TypeError
        If `net` is no Block, or `frozen` no bool.

    Warns
    -----
    UserWarning
        With the names that it does not reach, or may not reach: layers of a subclass
        that has its own methods, and running statistics that no layer has, because a
        block calls F.BatchNorm or has layers in a list. Also if there is nothing to
        freeze.

    Notes
    -----
    Call it between steps: it waits for the work in flight. With several processes call
    it on all ranks: where a layer is frozen on some of them only, the others wait for
    these in vain, and the error after the timeout says so.

    Examples
    --------
    >>> from gluon_syncbn import freeze_statistics, make_parallel
    >>> import mxnet as mx
    >>> from mxnet.gluon import nn
    >>> net = nn.HybridSequential()
    >>> net.add(nn.Dense(4), nn.BatchNorm(), nn.Dense(1))
    >>> net = make_parallel(net, ctx=[mx.cpu(0), mx.cpu(1)])
    >>> net.initialize()
    >>> net = freeze_statistics(net)
    >>> with mx.autograd.record():
    ...     y = net(mx.nd.random.normal(shape=(6, 3)))
    >>> net[1].running_mean.data(mx.cpu(0)).asnumpy().tolist()
    [0.0, 0.0, 0.0, 0.0]
    """
    check_block("net", net)
    frozen = check_bool("frozen", frozen)
    norms = _norms_to_change(net)
    mx.nd.waitall()
    for norm in norms:
        settings_of(norm.layer)["use_global_stats"] = frozen
    _apply(norms)
    verb = "freeze" if frozen else "thaw"
    unknown = [norm for norm in norms if own_methods(norm.layer)]
    unknown += strangers_to(net, norms)
    if unknown:
        warn(f"freeze_statistics may not {verb} {comma_list(unknown)}")
    elif not norms:
        warn(f"{name_of(net)} has no batch normalization to {verb}")
    return net


def convert(net: mx.gluon.Block, settings: Settings) -> list[Norm]:
    """Convert a net as :func:`convert_sync_batchnorm` does; return what was found."""
    norms = _norms_to_change(net)
    chosen = [norm for norm in norms if not norm.reason]
    _synchronize(chosen, settings)
    found = norms + strangers_to(net, norms)
    remaining = [norm for norm in found if norm.reason]
    if remaining:
        warn(f"these batch normalizations stay unsynchronized: {comma_list(remaining)}")
    return found


@contextmanager
def synchronized(net: mx.gluon.Block) -> Iterator[list[Norm]]:
    """Make every BatchNorm a SyncBatchNorm over all its contexts, for a ``with`` block.

    Layers that are one already, or frozen, do not change. Yield those that train their
    statistics; what cannot be converted has a reason.
    """
    norms = _norms_to_change(net)
    strangers = strangers_to(net, norms)
    norms = [norm for norm in norms if not norm.is_frozen()]
    plain = [n for n in norms if not (n.reason or isinstance(n.layer, SyncBatchNorm))]
    saved = [(n.layer, type(n.layer), dict(vars(n.layer))) for n in plain]
    try:
        _synchronize(plain, Settings())
        yield norms + strangers
    finally:
        for layer, cls, attributes in saved:
            if isinstance(layer, SyncBatchNorm):
                layer._sync.keep(False)
            layer.__class__ = cls
            vars(layer).clear()
            vars(layer).update(attributes)
        _apply(plain)


def _norms_to_change(net):
    norms = norms_of(net)
    if IS_GLUON_2 and any(norm.block is not None for norm in norms):
        # The blocks of MXNet 2 take no symbols, of which the new nodes would be made.
        raise NotImplementedError(
            "a SymbolBlock with batch normalization cannot be changed in MXNet 2, "
            "expected the blocks that its graph was made of"
        )
    return norms


def _synchronize(norms, settings):
    """Make layers synchronize; raise before any of them changes."""
    for norm in norms:
        _check(norm, settings)
    if any(isinstance(norm.layer, SyncBatchNorm) for norm in norms):
        mx.nd.waitall()  # calls in flight keep their settings
    _apply([norm for norm in norms if _convert_layer(norm, settings)])


def _check(norm, settings):
    made_with, where = settings_of(norm.layer), f" of {norm.name}"
    check_numbers(made_with["momentum"], made_with["eps"], where)
    # contrib's layer has no axis: it is 1
    check_int(f"axis{where}", made_with.get("axis", 1), minimum=-5, maximum=4)
    if norm.block is not None:
        ranks_of(settings.group, norm.name)
        if not settings.num_devices and not contexts_of(norm.layer.running_mean):
            raise ValueError(
                f"{norm.name} is in a SymbolBlock that is not initialized, so the "
                "number of its devices is not known. Initialize net first, or pass "
                "num_devices."
            )


def _apply(norms: Iterable[Norm]) -> None:
    """Remake the graphs that changed layers are in."""
    norms = list(norms)
    for block in {norm.block: None for norm in norms if norm.block is not None}:
        remake_graph(block)
    forget_graphs_with([norm.layer.running_mean for norm in norms])


def _convert_layer(norm, settings):
    """Make a layer a SyncBatchNorm; return whether its graphs are to be made anew."""
    layer = norm.layer
    _set_fixed_gamma(layer)
    if isinstance(layer, SyncBatchNorm):
        sync = layer._sync
        # A node may share it with the block that it was made of.
        if norm.block is None and sync.name == norm.name:
            sync.settings = settings
            sync.update(layer.contexts(), settings_of(layer), restarts=True)
            return False
        values = sync.activation, sync.original
    else:
        # MXNet before 1.8 has no layer with a ReLU.
        activation = RELU if getattr(layer, "fuse_relu", False) else NONE
        if isinstance(layer, ActivatedBatchNorm):
            activation = vars(layer).pop("_applied")
        values = activation, (type(layer), settings_of(layer))
        _keep_settings(layer)
        layer.__class__ = SyncBatchNorm
    layer._sync = Synchronization(norm.name, settings, *values)
    return True


def _revert_layer(block):
    """Make a SyncBatchNorm, or contrib's layer, the layer that it was."""
    _set_fixed_gamma(block)
    original, former = nn.BatchNorm, {}
    if isinstance(block, SyncBatchNorm):
        sync = vars(block).pop("_sync")
        sync.release()
        if sync.original is not None and sync.original[0] is not CONTRIB:
            original, former = sync.original
        elif sync.activation.name is not None:
            original, block._applied = ActivatedBatchNorm, sync.activation
        # Settings that changed since (GluonCV freezes statistics this way) stay.
        set_settings(block, {**former, **settings_of(block)})
    else:
        _keep_settings(block)
    block.__class__ = original


def _keep_settings(block):
    """Keep the settings that every layer has; contrib's has no axis, which is 1."""
    names = "axis", "eps", "momentum", "fix_gamma", "use_global_stats"
    set_settings(block, {name: settings_of(block).get(name, 1) for name in names})


def _set_fixed_gamma(block):
    """Set a gamma that is not used to 1, as training in MXNet does.

    Other programs read it from files.
    """
    if settings_of(block)["fix_gamma"]:
        with autograd.pause():
            for data in data_of(block.gamma):
                data[:] = 1
