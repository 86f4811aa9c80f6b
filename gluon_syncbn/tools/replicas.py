"""Checks whether a net is the same on all its devices, and in all processes.

It must not know how devices are driven.
"""

from __future__ import annotations

import hashlib
import itertools

import mxnet as mx
import numpy as np

from ..common.arguments import check_block, pluralize
from ..distributed.meeting import allgather
from ..mxnet_private.parameters import data_of

_FEW = 3  # names in a sentence


def check_replicas(net: mx.gluon.Block) -> None:
    """Checks that parameters and running statistics are identical everywhere.

    Bit by bit, on all devices and in all processes, which all call it. They are if
    every device applies the same gradients; running statistics only with batch
    normalization that is synchronized over all of them, in one group. Waits for the
    work in flight.

    Parameters
    ----------
    net : mxnet.gluon.Block
        Also one that :func:`make_parallel` returned. Parameters that are not
        initialized yet are skipped.

    Raises
    ------
    ValueError
        If there is a difference. The text names the first parameter that differs
        between contexts, these and the largest difference; or the first parameters that
        differ between two ranks. All processes raise it.
    mxnet.MXNetError
        If not all processes call it within the timeout. The text names the ranks.

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
    everyone = allgather((fault, digests), "check_replicas")
    for rank, (fault, _) in enumerate(everyone):
        if fault:
            raise ValueError((f"rank {rank}: " if len(everyone) > 1 else "") + fault)
    expected = everyone[0][1]
    for rank, (_, digests) in enumerate(everyone):
        names = [
            n for n in {**expected, **digests} if expected.get(n) != digests.get(n)
        ]
        if names:
            shown = ", ".join(f"'{name}'" for name in names[:_FEW])
            more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
            raise ValueError(
                f"{pluralize(len(names), 'parameter')} of rank {rank} and of rank 0 "
                f"differ, expected the same bits: {shown}{more}"
            )


def _between_devices(name, parameter):
    """The sentence about a parameter that differs between contexts, or None."""
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
