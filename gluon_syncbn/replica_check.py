"""A check that a net is the same on all its devices and in all processes."""

from __future__ import annotations

import hashlib
import itertools

import mxnet as mx
import numpy as np

from .arguments import check_block
from .distributed.collectives import allgather
from .mxnet_private.parameters import data_of

_SHOWN_NAMES = 3


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
        In all processes, if there is a difference. For contexts the text names the
        first parameter, the contexts and the largest difference, for ranks the first
        parameters.
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
    fault = next(filter(None, itertools.starmap(_between_devices, found.items())), None)
    digests = {name: _digest(data_of(p)[0].asnumpy()) for name, p in found.items()}
    of_ranks = allgather((fault, digests), "check_replicas")
    for rank, (fault, _) in enumerate(of_ranks):
        if fault:
            raise ValueError((f"rank {rank}: " if len(of_ranks) > 1 else "") + fault)
    expected = of_ranks[0][1]
    for rank, (_, digests) in enumerate(of_ranks):
        names = [
            n for n in {**expected, **digests} if expected.get(n) != digests.get(n)
        ]
        if names:
            shown = ", ".join(f"'{name}'" for name in names[:_SHOWN_NAMES])
            others = len(names) - _SHOWN_NAMES
            more = f" and {others} more" if others > 0 else ""
            raise ValueError(
                f"parameters must be equal on all ranks, got {len(names)} that differ "
                f"between rank 0 and rank {rank}: {shown}{more}"
            )


def _between_devices(name, parameter):
    """Return an error text if a parameter differs between contexts, else None."""
    first, *others = data_of(parameter)
    expected = first.asnumpy()
    for other in others:
        value = other.asnumpy()
        if value.tobytes() != expected.tobytes():
            difference = np.abs(value.astype("f8") - expected.astype("f8")).max()
            return (
                f"parameter '{name}' differs between {first.context} and "
                f"{other.context}, by up to {difference}"
            )
    return None


def _digest(value):
    text = f"{value.dtype} {value.shape}".encode()
    return hashlib.sha256(text + value.tobytes()).hexdigest()
