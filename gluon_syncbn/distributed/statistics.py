"""One average of the running statistics that devices and processes have alone."""

from __future__ import annotations

import functools
import math

import mxnet as mx
import numpy as np
from mxnet import autograd

from ..common.arguments import check_block, check_real
from ..common.moments import Moments
from ..layer.finding import running_statistics
from ..mxnet_private.parameters import data_of
from ..native.interrupts import DeferredSignals
from ..native.world import wait_seconds, world
from .meeting import allgather
from .parameters import check_equal_nets


def average_statistics(
    net: mx.gluon.Block, weight: float = 1.0, timeout: float | None = None
) -> None:
    r"""Gives all devices and processes the average of their running statistics.

    Where layers synchronize in groups, or not at all, each has its own, and a file gets
    those of one. Of replicas with weights :math:`w_i` every layer gets

    .. math::
        \mu = \frac{\sum_i w_i \mu_i}{\sum_i w_i}, \qquad
        \sigma^2 = \frac{\sum_i w_i (\sigma_i^2 + (\mu_i - \mu)^2)}{\sum_i w_i},

    mean and variance of all that the replicas have seen, and the same bits everywhere.
    Every process calls it. For statistics of the final parameters, see
    :func:`gluon_syncbn.recompute_statistics`.

    Parameters
    ----------
    net : mxnet.gluon.Block
        Initialized, on one context or several. All its batch normalizations are
        averaged, nn.BatchNorm too.
    weight : float, default 1.0
        Of each device of this process, for example its share of the rows; by default a
        group counts by its number of devices.
    timeout : float or None, default None
        As in :func:`broadcast_parameters`.

    Raises
    ------
    ValueError
        If the nets differ. The text names the first difference and both ranks.
    RuntimeError
        If a layer is not initialized.
    mxnet.MXNetError
        If not all processes call it within the timeout. The text names the ranks.

    Examples
    --------
    >>> from gluon_syncbn import distributed
    >>> import mxnet as mx
    >>> layer = mx.gluon.nn.BatchNorm(in_channels=1)
    >>> layer.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    >>> layer.running_mean.data(mx.cpu(1))[:] = 4
    >>> distributed.average_statistics(layer)
    >>> [float(mean.asscalar()) for mean in layer.running_mean.list_data()]
    [2.0, 2.0]
    >>> [float(var.asscalar()) for var in layer.running_var.list_data()]
    [5.0, 5.0]
    """
    check_block("net", net)
    positive = "a positive number"
    weight = check_real("weight", weight, positive, lambda v: 0 < v < math.inf)
    wait_seconds(timeout)
    if world().size > 1:
        check_equal_nets(net, timeout=timeout)
    pairs = running_statistics(net)
    own = [_moments(weight, *both) for both in pairs]
    everyone = allgather(own, "average_statistics", timeout)
    with autograd.pause(), DeferredSignals():
        for both, replicas in zip(pairs, zip(*everyone)):
            total = functools.reduce(Moments.merge, sum(replicas, []))
            for parameter, value in zip(both, (total.mean, total.m2 / total.count)):
                for data in data_of(parameter):
                    data[:] = value.astype(data.dtype)


def _moments(weight, mean, var):
    """Those of each replica of a layer."""
    if not data_of(mean):
        raise RuntimeError(
            f"the parameter {mean.name} is not initialized: call net.initialize() "
            "before statistics are averaged"
        )
    values = [
        [array.asnumpy().astype(np.float64) for array in data_of(parameter)]
        for parameter in (mean, var)
    ]
    return [Moments(weight, mean, weight * var) for mean, var in zip(*values)]
