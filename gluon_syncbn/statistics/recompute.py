"""Running statistics from batches, with the parameters as they are.

It drives the net, and brings together what the ranks of a group have collected;
``collecting.py`` collects.
"""

from __future__ import annotations

import itertools
from typing import Any, Iterable

import mxnet as mx
import numpy as np
from mxnet import autograd

from ..common.arguments import check_block, check_choice, check_int, short_repr
from ..devices.devices import Devices
from ..distributed.meeting import allgather
from ..layer.finding import synchronized_layers
from ..mxnet_private.blocks import name_of
from ..mxnet_private.parameters import contexts_of, data_of
from ..native import failures
from ..native.interrupts import DeferredSignals
from ..native.world import world
from ..parallel.forward import is_parallel
from ..parallel.participation import calling
from ..parallel.shards import Shards
from .collecting import collecting, read_collected, synchronized

_VARIANCES = "population", "pooled"


def recompute_statistics(
    net: mx.gluon.Block,
    batches: Iterable,
    steps: int | None = None,
    variance: str = "population",
) -> None:
    r"""Sets the running statistics to those of some batches, with fixed parameters.

    A running average mixes the statistics of many past nets; those of the final one
    are what inference needs. Layers normalize with each batch's own statistics, as in
    training, over all devices and processes of their group. Everything else is in
    inference mode: Dropout drops nothing. With batches of :math:`n_b` elements,
    mean :math:`\mu_b` and biased variance :math:`\sigma_b^2` of a channel, the running
    mean is

    .. math::
        \mu = \frac{1}{N} \sum_b n_b \mu_b, \qquad N = \sum_b n_b,

    and the running variance

    .. math::
        \sigma^2 = \frac{1}{N} \sum_b n_b \left(\sigma_b^2 + (\mu_b - \mu)^2\right)

    is that of all elements together (the law of total variance), whatever the sizes of
    the batches: also for a layer that sees one element in each. ``"pooled"`` leaves out
    the second term, and so averages the variances that the layer normalized with.

    Parameters
    ----------
    net : mxnet.gluon.Block
        On any contexts, parallel or not, hybridized or not. BatchNorm layers are
        synchronized for the time of the call. Layers that are frozen
        (``use_global_stats``), that `net` does not call, or that
        :func:`convert_sync_batchnorm` leaves as they are, keep their statistics.
    batches : iterable
        Of inputs: each is an array, or a tuple or list of the arguments of `net`. Where
        `net` is on several contexts they are whole batches, which are split over these.
        With several processes each calls this function, with batches of its own, of
        which it may have more or fewer than others. A layer with ``nonfinite="skip"``
        leaves out those whose moments are not finite.
    steps : int or None, default None
        The largest number of batches; None means all.
    variance : str, "population" or "pooled", default "population"
        Layers with `unbiased_running_var` divide by :math:`N - 1`, or for ``"pooled"``
        by N less the number of batches.

    Raises
    ------
    ValueError
        If `batches` is empty or reaches no layer, or a result is not finite.
    RuntimeError
        If `net` is not initialized.
    mxnet.MXNetError
        As in training. After this or any other error the statistics are those from
        before the call; with several processes all of them get an error, and call
        :func:`gluon_syncbn.recover`.

    Notes
    -----
    Sums are in float64, so a result equals the formula but for the layer's own
    rounding of the batches and one rounding to the dtype of the running statistics.

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
        raise TypeError(
            f"batches is an iterable of batches, but got {short_repr(batches)}"
        )
    if steps is not None:
        check_int("steps", steps, minimum=1)
    check_choice("variance", variance, _VARIANCES)
    with synchronized(net):
        layers = synchronized_layers(net)
        if not layers:
            raise ValueError(
                f"{name_of(net)} has no BatchNorm that is not frozen, expected at "
                "least one"
            )
        # By key: a layer may be in several places.
        by_key = {layer.key: layer for layer in layers}
        with collecting(by_key):
            _run(net, layers, itertools.islice(batches, steps))
            found = list(map(read_collected, by_key))
        layers = list(by_key.values())
        names, ranks = zip(*((layer.name, layer.ranks()) for layer in layers))
    _write(layers, _of_all_ranks(found, names, ranks), variance)


def _run(net, layers, batches):
    """Calls the net on each batch, and waits for it."""
    if is_parallel(net):
        _drive(net, layers, batches, net.devices, net.forward.batch_axis)
        return
    found = map(contexts_of, net.collect_params().values())
    contexts = list(dict.fromkeys(itertools.chain(*found)))
    if not contexts:
        raise RuntimeError(
            f"{name_of(net)} is not initialized: call net.initialize() before its "
            "statistics are recomputed"
        )
    # One device takes inputs of any kind, as they are.
    axis = None if len(contexts) == 1 else 0
    _drive(net, layers, batches, Devices(contexts), axis)


def _drive(net, layers, batches, devices, axis):
    with autograd.pause(train_mode=False):
        for arguments in _told(batches):
            if not isinstance(arguments, (list, tuple)):
                arguments = (arguments,)
            if axis is None:
                shards = Shards.as_is(arguments, *devices.contexts)
            else:
                shards = Shards.split(arguments, devices.contexts, axis)
            with calling(layers, shards.contexts):
                devices.map_first(lambda args: net(*args), shards.arguments)
    if world().size > 1:
        world().join(failures.get_timeout())


def _told(batches):
    """The batches; other processes are told of an error in their source."""
    try:
        yield from batches
    except (Exception, KeyboardInterrupt) as error:
        if world().size > 1:
            reason = f"recompute_statistics raised {type(error).__name__}: {error}"
            failures.end_waits(reason)
            failures.give_up(reason)
        raise


def _of_all_ranks(found, names, ranks):
    """The moments of each layer, from the rank of its group that had the most batches.

    All ranks of a group have collected the same until the first of them has joined.
    Raises on all ranks what concerns one.
    """
    faults = filter(None, map(_fault, names, found))
    everyone = allgather((next(faults, None), found), "recompute_statistics")
    for fault, _ in everyone:
        if fault:
            raise ValueError(fault)
    collected = [theirs for _, theirs in everyone]
    if not any(map(any, collected)):
        raise ValueError(
            "no batch has reached a BatchNorm that is not frozen, expected at least "
            "one batch and one such layer"
        )
    per_layer = [[collected[r][k] for r in members] for k, members in enumerate(ranks)]
    return [max(group, key=_count_batches) for group in per_layer]


def _count_batches(collected):
    return collected.batches if collected else 0


def _fault(name, collected):
    """The sentence about a result that is not finite, or None."""
    if not collected or np.isfinite([collected.total.mean, collected.total.m2]).all():
        return None
    return (
        f"SyncBatchNorm '{name}': the statistics of the batches are not finite, "
        "expected finite parameters and inputs; running statistics keep their values"
    )


def _write(layers, found, variance):
    """Sets the statistics; layers may share them."""
    merged: dict[Any, Any] = {}
    for layer, one in zip(layers, found):
        if one:
            place = layer.running_mean, layer.running_var
            merged[place] = merged[place].merge(one) if place in merged else one
    with autograd.pause(), DeferredSignals():
        for parameters, one in merged.items():
            values = one.total.mean, one.variance(variance)
            for parameter, value in zip(parameters, values):
                for data in data_of(parameter):
                    data[:] = value.astype(data.dtype)
