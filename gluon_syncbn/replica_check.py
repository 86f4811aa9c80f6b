"""A check that a net is the same on all its devices and in all processes."""

from __future__ import annotations

import hashlib
import itertools

import mxnet as mx
import numpy as np

from .arguments import check_block
from .distributed.collectives import allgather, check_equal
from .mxnet_private.parameters import data_of
from .native.processes import world


def check_replicas(net: mx.gluon.Block) -> None:
    """Check that all devices and processes have identical parameters.

    Parameters and running statistics are compared bit by bit. All processes must call
    this function, which waits for pending work. Parameters are identical if every
    device applies the same gradients. Running statistics are identical only if each
    layer is synchronized over all devices and processes.

    Parameters
    ----------
    net : mxnet.gluon.Block
        The net, parallel or not. Parameters that are not initialized are skipped.

    Raises
    ------
    TypeError
        If `net` is not a Block.
    ValueError
        In all processes, if there is a difference. The text names the first parameter
        that differs, and the contexts or ranks.
    mxnet.MXNetError
        If not all processes call this function within the timeout. The text names the
        missing ranks.

    Examples
    --------
    >>> from gluon_syncbn import check_replicas
    >>> import mxnet as mx
    >>> net = mx.gluon.nn.Dense(1, in_units=1, prefix="dense_")
    >>> net.initialize(mx.init.One(), ctx=[mx.cpu(0), mx.cpu(1)])
    >>> check_replicas(net)
    >>> net.weight.data(mx.cpu(1))[:] = 3
    >>> check_replicas(net)
    Traceback (most recent call last):
    ...
    ValueError: parameter 'dense_weight' differs between cpu(0) and cpu(1), by up to 2.0
    """
    check_block("net", net)
    mx.nd.waitall()
    found = {n: p for n, p in net.collect_params().items() if data_of(p)}
    faults = list(filter(None, itertools.starmap(_difference, found.items())))
    for fault in allgather(faults[:1], "check_replicas"):
        if fault:
            raise ValueError(fault[0])
    lines = [f"'{name}' {_digest(data_of(p)[0])}" for name, p in found.items()]
    check_equal("parameters", lines, "Call distributed.broadcast_parameters(net).")


def _difference(name, parameter):
    """Return an error text if a parameter differs between contexts, else None."""
    first, *others = data_of(parameter)
    expected = first.asnumpy()
    for other in others:
        value = other.asnumpy()
        if value.tobytes() != expected.tobytes():
            difference = np.abs(value.astype("f8") - expected.astype("f8")).max()
            rank = f" on rank {world().rank}" if world().size > 1 else ""
            return (
                f"parameter '{name}' differs between {first.context} and "
                f"{other.context}{rank}, by up to {difference}"
            )
    return None


def _digest(array):
    value = array.asnumpy()
    digest = hashlib.sha256(value.tobytes()).hexdigest()
    return f"({value.dtype}, shape {value.shape}, SHA-256 {digest[:16]}...)"
