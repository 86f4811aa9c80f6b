"""Checks whether a net is the same on all its devices.

Called by users and tests, between steps. It must not know how devices are driven.
"""

from __future__ import annotations

import mxnet as mx
import numpy as np

from ..common.arguments import check_block
from ..mxnet_private.parameters import data_of


def check_replicas(net: mx.gluon.Block) -> None:
    """Checks that parameters and running statistics are identical on all devices.

    Bit by bit. They are if every device applies the same gradients; running statistics
    only with synchronized batch normalization. Waits for the work in flight.

    Parameters
    ----------
    net : mxnet.gluon.Block
        Also one that :func:`make_parallel` returned. Parameters that are not
        initialized yet are skipped.

    Raises
    ------
    ValueError
        If there is a difference. The text names the first parameter that differs, the
        two contexts and the largest difference.

    Examples
    --------
    >>> import mxnet as mx
    >>> from gluon_syncbn import check_replicas
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
    for name, parameter in net.collect_params().items():
        if not data_of(parameter):
            continue
        first, *others = data_of(parameter)
        expected = first.asnumpy()
        for other in others:
            value = other.asnumpy()
            if value.tobytes() != expected.tobytes():
                difference = np.abs(value.astype("f8") - expected.astype("f8")).max()
                raise ValueError(
                    f"parameter '{name}' differs between {first.context} and "
                    f"{other.context}, by up to {difference}"
                )
