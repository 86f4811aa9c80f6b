"""Recompute the running statistics of a net from some batches.

While native code collects the moments of a layer's batches, the layer uses batch
statistics in inference, and does not change its running statistics.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from typing import Iterable, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import autograd

from .arguments import check_block, check_int, comma_list, short_repr
from .layer.convert import synchronized
from .mxnet_private.arrays import array_of, to_context
from .mxnet_private.blocks import count_inputs, name_of
from .mxnet_private.parameters import contexts_of, data_of
from .native.failures import end_waits
from .native.interrupts import DeferredSignals
from .native.library import load
from .native.processes import allgather, world
from .native.program_lines import warn
from .nested import flatten, rebuild
from .parallel.devices import Devices
from .parallel.forward import is_parallel
from .parallel.participants import only_participants
from .parallel.shards import Shards, check_array


def recompute_statistics(
    net: mx.gluon.Block, batches: Iterable, steps: int | None = None
) -> None:
    r"""Recompute running statistics from some batches, with fixed parameters.

    A running average mixes the statistics of many earlier states of the net, but
    inference needs the statistics of the final state. This function calls `net` on the
    batches. As in training, a layer normalizes with the statistics of the batch over
    all devices, and over the processes of its `group`. Everything else is in inference
    mode, so Dropout drops nothing. If batch :math:`b` has :math:`n_b` elements of a
    channel with mean :math:`\mu_b` and biased variance :math:`\sigma_b^2`, the running
    mean becomes

    .. math::
        \mu = \frac{1}{N} \sum_b n_b \mu_b, \qquad N = \sum_b n_b,

    and the running variance becomes

    .. math::
        \sigma^2 = \frac{1}{N} \sum_b n_b \left(\sigma_b^2 + (\mu_b - \mu)^2\right),

    the variance of all elements of all batches, whatever the sizes of the batches.
    Layers with `unbiased_running_var` divide by :math:`N - 1` instead.

    Parameters
    ----------
    net : mxnet.gluon.Block
        An initialized net on any contexts, parallel or not, hybridized or not. Its
        BatchNorm layers are synchronized during the call. Frozen layers
        (``use_global_stats``) and layers that `net` does not call keep their
        statistics.
    batches : iterable
        Each batch is an array, an ``mx.io.DataBatch``, or a tuple or list that begins
        with the inputs of `net`. Later elements of a tuple or list, such as labels, are
        ignored. The second input `mask` of a SyncBatchNorm is also ignored if `net` is
        this layer, or a Sequential that begins with it. Arrays are NumPy's or MXNet's,
        on any context. If `net` is on several contexts, each batch is split over them.
        Processes need equally many batches. A layer with ``nonfinite="skip"`` ignores
        batches whose moments are not finite.
    steps : int or None, default None
        Maximum number of batches. By default all batches are used.

    Raises
    ------
    TypeError, ValueError
        If an argument or a batch is wrong, `batches` is empty, no layer is called, a
        result is not finite, or the processes have different numbers of batches.
    RuntimeError
        If `net` is not initialized.
    mxnet.MXNetError
        For the same reasons as in training, or if not all processes call this function
        within the timeout. After any error the running statistics are unchanged, and
        all processes get an error.

    Warns
    -----
    UserWarning
        With the names of batch normalizations that keep their statistics because they
        cannot be converted, see :func:`convert_sync_batchnorm`.

    Notes
    -----
    The iterable `batches` may call `net` itself, for example to make pseudo-labels. The
    result does not depend on these calls. While this function runs, another thread may
    call a parallel `net`, but must not call children of `net`.

    References
    ----------
    Wu and Johnson, Rethinking "Batch" in BatchNorm, arXiv:2105.07576, section 3.

    Examples
    --------
    >>> from gluon_syncbn import recompute_statistics
    >>> import mxnet as mx
    >>> layer = mx.gluon.nn.BatchNorm()
    >>> layer.initialize()
    >>> batches = mx.nd.array([[1.0], [3.0]]), mx.nd.array([[8.0]])
    >>> recompute_statistics(layer, batches)
    >>> mean, var = layer.running_mean.data(), layer.running_var.data()
    >>> float(mean.asscalar()), round(float(var.asscalar()), 4)
    (4.0, 8.6667)
    """
    check_block("net", net)
    is_array = isinstance(batches, (mx.nd.NDArray, np.ndarray))
    if is_array or not hasattr(batches, "__iter__"):
        shape = getattr(batches, "shape", None)
        found = f"an array of shape {shape}" if is_array else short_repr(batches)
        raise TypeError(
            f"batches must be an iterable of batches, got {found}. Pass a DataLoader, "
            "or [x] for one batch x."
        )
    if steps is not None:
        check_int("steps", steps, minimum=1)
    devices, axis = _devices_and_axis(net)
    allgather(None, "recompute_statistics")  # an error unless all ranks call it here
    with synchronized(net) as norms:
        layers = [norm.layer for norm in norms if not norm.reason]
        unconverted = [norm for norm in norms if norm.reason]
        if unconverted:
            names = comma_list(unconverted)
            warn(f"these batch normalizations keep their statistics: {names}")
        if not layers:
            raise ValueError(
                "net must have a BatchNorm that can be converted and is not frozen, "
                f"got {name_of(net)}"
            )
        batches = itertools.islice(batches, steps)
        moments = _collect(net, layers, devices, axis, batches)
    values = _running_values(moments)
    _check_all_ranks(values)
    with autograd.pause(), DeferredSignals():
        for parameter, value in values.items():
            for data in data_of(parameter):
                data[:] = value


def _collect(net, layers, devices, axis, batches):
    """Call the net on each batch; return {(running mean, running variance): moments}.

    Layers that share these parameters share the moments.
    """
    moments: dict[tuple, _Moments] = {}
    for batch in _equally_many(batches):
        with _telling_ranks(), autograd.pause(train_mode=False):
            shards = _split(net, batch, devices.contexts, axis)
            _call(net, shards, devices, layers)
        for layer in layers:
            key = layer.running_mean, layer.running_var
            former, more = moments.get(key), _moments_of(layer)
            if more:
                moments[key] = former.merge(more) if former else more
    return moments


def _devices_and_axis(net):
    if is_parallel(net):
        return net.devices, net.forward.batch_axis
    found = map(contexts_of, net.collect_params().values())
    contexts = list(dict.fromkeys(itertools.chain(*found)))
    if not contexts:
        raise RuntimeError(
            f"{name_of(net)} is not initialized. Call net.initialize() first."
        )
    return Devices(contexts), 0


def _split(net, batch, contexts, axis):
    if isinstance(batch, mx.io.DataBatch):
        batch = [array[: len(array) - (batch.pad or 0)] for array in batch.data]
    elif isinstance(batch, (list, tuple)):
        batch = batch[: count_inputs(net)]
    else:
        batch = [batch]
    leaves = flatten(batch)
    if len(contexts) > 1:
        return Shards.split(batch, leaves, contexts, axis)
    # One device accepts inputs of any type, but no empty arrays.
    leaves = [_copy_to(leaf, contexts[0]) for leaf in leaves]
    return Shards.as_is(rebuild(list(batch), iter(leaves)), *contexts)


def _copy_to(leaf, context):
    if not isinstance(leaf, (mx.nd.NDArray, np.ndarray)):
        return leaf
    check_array(leaf)
    if 0 in leaf.shape:
        raise ValueError(f"arrays of a batch must not be empty, got shape {leaf.shape}")
    is_mxnets = isinstance(leaf, mx.nd.NDArray)
    return to_context(leaf, context) if is_mxnets else array_of(leaf, context)


def _call(net, shards, devices, layers):
    """Call the net on all devices while its layers collect moments."""
    started = itertools.count(1)

    def collect(starts):
        for layer in layers:
            load().gluon_syncbn_collect(layer._sync.key, starts)

    def call(arguments):
        number = next(started)
        if number == 1:
            mx.nd.waitall()  # otherwise pending work would also be collected
            collect(True)
        net(*arguments)
        if number == len(shards.contexts):
            mx.nd.waitall()
            collect(False)

    try:
        with only_participants(layers, shards.contexts):
            devices.map_first(call, shards.arguments)
    finally:
        collect(False)


class _Moments(NamedTuple):
    """The moments of each channel in float64."""

    is_unbiased: bool
    size: float
    mean: np.ndarray
    m2: np.ndarray  # the sum of (x - mean)^2

    def merge(self, other: _Moments) -> _Moments:
        """Return the moments of both; doi:10.1080/00031305.1983.10483115."""
        size = self.size + other.size
        delta, weight = other.mean - self.mean, other.size / size
        m2 = self.m2 + other.m2 + delta**2 * self.size * weight
        return _Moments(self.is_unbiased, size, self.mean + delta * weight, m2)


def _moments_of(layer):
    """Return the moments that a layer has collected, or None without a batch."""
    length = load().gluon_syncbn_collected(layer._sync.key, None, 0)
    if length == 0:
        return None
    numbers = np.empty(length)
    load().gluon_syncbn_collected(layer._sync.key, numbers.ctypes.data, length)
    mean, m2 = numbers[1:].reshape(2, -1)
    is_unbiased = layer._sync.settings.unbiased_running_var
    return _Moments(is_unbiased, numbers[0], mean, m2)


@contextmanager
def _telling_ranks():
    """Raise an exception also on the other ranks, which would wait for this one."""
    try:
        yield
    except BaseException as error:
        if world().size > 1:
            reason = f"recompute_statistics raised {type(error).__name__}: {error}"
            end_waits(reason)
        raise


def _equally_many(batches):
    """Yield the batches; raise an error on all ranks if one rank cannot continue."""
    iterator, end, count = iter(batches), object(), 0
    while True:
        with _telling_ranks():
            batch = next(iterator, end)
        found = allgather(batch is not end, "recompute_statistics, next batch")
        if not all(found):
            break
        yield batch
        count += 1
    if any(found):
        raise ValueError(
            f"batches must be equally many on all ranks, got {count} on rank "
            f"{found.index(False)} and more on rank {found.index(True)}"
        )
    if count == 0:
        raise ValueError(
            "batches must have at least one batch, got none. Was this generator or "
            "iterator used before? Call reset() on an NDArrayIter."
        )


def _running_values(moments):
    values = {}
    for (running_mean, running_var), (is_unbiased, size, mean, m2) in moments.items():
        var = m2 / max(1, size - is_unbiased)  # m2 is 0 if size is 1
        with np.errstate(over="ignore"):  # a value may be finite in float64 only
            values[running_mean] = mean.astype(running_mean.dtype)
            values[running_var] = var.astype(running_var.dtype)
    return values


def _check_all_ranks(values):
    """Raise ValueError on all ranks if one rank has a fault."""
    faults = [
        f"{parameter.name} of all batches must be finite. Check the parameters and "
        "inputs. The running statistics are unchanged."
        for parameter, value in values.items()
        if not np.isfinite(value).all()
    ]
    if not values:
        faults = [
            "net must call a BatchNorm that is not frozen on a finite batch, got no "
            "such call"
        ]
    for fault in allgather(faults, "recompute_statistics"):
        if fault:
            raise ValueError(fault[0])
