"""Freezes the running statistics of whole nets, and thaws them.

It must not know how a layer is computed, frozen or not.
"""

from __future__ import annotations

import mxnet as mx
from mxnet.gluon import SymbolBlock

from ..common.arguments import check_block, check_bool
from ..mxnet_private.blocks import (
    BatchNormBase,
    blocks_of,
    forget_graph,
    forget_graphs_with,
    settings_of,
)
from .symbol_blocks import check_symbol_block, freeze_graph


def freeze_statistics(net: mx.gluon.Block, frozen: bool = True) -> mx.gluon.Block:
    """Fixes the running statistics of every batch normalization of a net, or thaws it.

    A frozen layer normalizes with its running statistics in training as well, and no
    longer updates them. gamma and beta still train. It is MXNet's own BatchNorm in the
    graph: it waits for no other device, and exports as it is.

    Parameters
    ----------
    net : mxnet.gluon.Block
        A net or a part of one, before or after its first call, converted or not,
        parallel, hybridized, or a SymbolBlock. Hybridized blocks that it is part of
        trace their graph again if it holds a SyncBatchNorm; else call their
        `hybridize`.
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
    check_bool("frozen", frozen)
    types = BatchNormBase, SymbolBlock
    changed = [block for block in blocks_of(net) if isinstance(block, types)]
    for block in changed:
        check_symbol_block(block)
    mx.nd.waitall()
    for block in changed:
        if isinstance(block, SymbolBlock):
            freeze_graph(block, bool(frozen))
        else:
            settings_of(block)["use_global_stats"] = bool(frozen)
    net.apply(forget_graph)
    forget_graphs_with(set(changed))
    return net
