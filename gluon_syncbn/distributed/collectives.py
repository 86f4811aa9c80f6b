"""Copies and comparisons of parameters, and waits for MPI's collectives.

A collective of mpi4py never times out, and does not report which ranks are missing. So
all ranks first call `allgather`, which reports them. Only JSON and arrays are sent,
because a received pickle could run code.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from contextlib import contextmanager
from functools import partial
from typing import Any, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import Block

from ..arguments import check_block, check_int, short_repr
from ..layer.batch_norm import SyncBatchNorm
from ..mxnet_private.arrays import array_of
from ..mxnet_private.blocks import names_in, parameters_by_place, settings_of
from ..mxnet_private.owners import copy_owners, stale_parameters
from ..mxnet_private.parameters import data_of, is_deferred, when_initialized
from ..native import failures
from ..native.interrupts import DeferredSignals
from ..native.processes import allgather, world
from ..native.timeouts import wait_seconds

_AWAKE, _PAUSE, _DEFERRING = 0.1, 5e-4, 1.5  # seconds, see `collectives`
_net_numbers = itertools.count(1)  # numbers of nets that are broadcast
_abandoned: list = []  # memory that MPI may still write to after a failure


@contextmanager
def collectives(
    name: str, timeout: float | None = None, memory: Any = None
) -> Iterator[list]:
    """Yield a list; wait for MPI's requests that the ``with`` block appends to it.

    Raise MXNetError if another rank has failed, or if the requests are not done within
    the timeout. After any error all ranks fail, and `memory`, which MPI may still use,
    is never freed.
    """
    from mpi4py import MPI

    seconds, requests = wait_seconds(timeout), []  # type: ignore[var-annotated]
    try:
        yield requests
        begin = time.monotonic()
        # Ctrl-C cannot end this wait in its first _DEFERRING seconds.
        with DeferredSignals() as section:
            while not MPI.Request.Testall(requests):  # Testall also lets MPI proceed
                waited = time.monotonic() - begin
                if waited < _AWAKE:  # poll without sleep
                    os.sched_yield()
                    continue
                failure = failures.failure()
                if not failure and waited > seconds:
                    failure = (
                        f"{name}: values did not arrive within {seconds:g} s, because "
                        "a rank that had begun this call has died or was stopped"
                    )
                if failure:
                    raise mx.MXNetError(failure)
                if waited < _DEFERRING:
                    time.sleep(_PAUSE)
                else:
                    section.wait(0, time.sleep, _PAUSE)
    except BaseException as error:
        _abandoned.append((memory, requests))
        failures.end_waits(str(error) or repr(error))  # also on the other ranks
        raise


# ---- Parameters.


def broadcast_parameters(net: Any, root: int = 0, timeout: float | None = None) -> None:
    """Copy parameters and running statistics of the process `root` to all others.

    The nets are compared first, so different parameters with the same name are an
    error, for example if a rank makes its layers in another order. For a Block the
    places of parameters and layers in the net, and the settings of layers, are also
    compared. Afterwards the layers of all ranks find each other by these places.

    Parameters
    ----------
    net : mxnet.gluon.Block, ParameterDict or list of Parameter
        The parameters to copy. A parameter with an unknown shape is copied in the first
        forward call.
    root : int, default 0
        The rank to copy from.
    timeout : float or None, default None
        Seconds to wait for the other processes; None means
        :func:`gluon_syncbn.get_timeout`.

    Raises
    ------
    ValueError
        If the nets differ. The text names the first difference and both ranks.
    RuntimeError
        If a parameter is not initialized.
    mxnet.MXNetError
        If a rank does not call this function in time. The text names the rank.

    Examples
    --------
    Every rank has initialized the net with different numbers:

    .. code-block:: python

        from gluon_syncbn import distributed
        import mxnet as mx

        distributed.init()
        net = mx.gluon.nn.Dense(2, in_units=2)
        net.initialize(mx.init.Constant(distributed.rank()))
        distributed.broadcast_parameters(net)
        assert (net.weight.data() == 0).asnumpy().all()
    """
    parameters = check_parameters(net)
    check_int("root", root, minimum=0, maximum=world().size - 1)
    wait_seconds(timeout)
    if world().size == 1:
        return
    fix = "Make nets and layers in the same order on all ranks, or give them prefixes."
    check_equal("nets", _description(net), fix, timeout)
    for parameter in parameters:
        if not data_of(parameter) and not is_deferred(parameter):
            raise RuntimeError(
                f"the parameter {parameter.name} is not initialized. Call "
                "net.initialize() before broadcast_parameters."
            )
    # oneDNN may still change a weight's layout, and a read would not wait for that.
    mx.nd.waitall()
    # Names of blocks depend on what else a rank has made, places in a net do not.
    number = next(_net_numbers)
    for place, layer in layers_by_place(net).items():
        layer._sync.share_as(f"{layer.name} (at '{place}' of net {number})")
    _copy(list(filter(data_of, parameters)), root, "broadcast_parameters", timeout)
    for number, parameter in enumerate(parameters):
        if not data_of(parameter):
            name = f"broadcast_parameters, number {number}, {parameter.name}"
            when_initialized(
                parameter, partial(_copy, [parameter], root, name, timeout)
            )


def check_parameters(net: Any) -> list:
    """Return the parameters of a net, ParameterDict or list as a list in order."""
    found = net.collect_params() if isinstance(net, Block) else net
    found = list(found.values()) if hasattr(found, "values") else found
    if not isinstance(found, (list, tuple)) or not all(
        isinstance(parameter, mx.gluon.Parameter) for parameter in found
    ):
        raise TypeError(
            "net must be a gluon.Block, a ParameterDict or a list of Parameter, got "
            f"{short_repr(net)}"
        )
    return list(found)


def check_equal(what: str, lines: list, fix: str, timeout: float | None = None) -> None:
    """Raise ValueError on all ranks if a rank's lines of text differ from rank 0's."""
    digests = allgather(digest_of(lines), f"comparison of {what}", timeout)
    check_digests(what, digests, lines, fix, timeout)


def check_digests(
    what: str, digests: Sequence, lines: list, fix: str, timeout: float | None = None
) -> None:
    """Raise ValueError with the first different line if a digest is not rank 0's."""
    other = next((n for n, found in enumerate(digests) if found != digests[0]), None)
    if other is None:
        return
    own = lines if world().rank in (0, other) else []
    lists = allgather(own, f"lines of {what}", timeout)
    pairs = itertools.zip_longest(lists[0], lists[other], fillvalue="nothing more")
    expected, line = next(pair for pair in pairs if pair[0] != pair[1])
    raise ValueError(
        f"{what} must be equal on all ranks, got {expected} on rank 0 and {line} on "
        f"rank {other}. {fix}"
    )


def digest_of(values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def layers_by_place(net: Any) -> dict[str, SyncBatchNorm]:
    """Return the SyncBatchNorm layers of a net; none if only parameters are known."""
    blocks = names_in(net).items() if isinstance(net, Block) else ()
    return {place: x for x, place in blocks if isinstance(x, SyncBatchNorm)}


def _description(net):
    if not isinstance(net, Block):
        return [_describe(parameter) for parameter in check_parameters(net)]
    found = parameters_by_place(net)
    lines = [f"{_describe(parameter)} at {place}" for place, parameter in found.items()]
    return lines + [
        f"the layer '{x.name}' with {settings_of(x)}, {x._sync.shared_settings()} at "
        f"{place}"
        for place, x in layers_by_place(net).items()
    ]


def _describe(parameter):
    shape = parameter.shape if data_of(parameter) else "not known yet"
    return f"{parameter.name} ({parameter.dtype}, shape {shape})"


def _copy(parameters, root, name, timeout):
    values = [p.list_data()[0].asnumpy() for p in parameters]
    lines = [f"root={root}, {sum(value.nbytes for value in values)} bytes"]
    check_equal(name, lines, "Call it with the same arguments.", timeout)
    with collectives(name, timeout) as requests:
        for value in values:  # sent as bytes, because MPI has no float16
            data = value.reshape(-1).view(np.uint8)
            requests.append(world().comm.Ibcast(data, root))
    if world().rank != root:
        with autograd.pause():
            for parameter, value in zip(parameters, values):
                parameter.set_data(array_of(value, mx.cpu()))


# ---- Replicas.


def check_replicas(net: mx.gluon.Block) -> None:
    """Check that all devices and processes have identical parameters.

    Parameters and running statistics are compared bit by bit. All processes must call
    this function, which waits for pending work. Identical parameters remain identical
    if every device applies the same gradients. Running statistics are identical only if
    each layer is synchronized over all devices and processes.

    Parameters
    ----------
    net : mxnet.gluon.Block
        The net, parallel or not. Parameters that are not initialized are skipped.

    Raises
    ------
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
    copy_owners(stale_parameters(found.values()))
    mx.nd.waitall()
    faults = itertools.starmap(_difference_of_contexts, found.items())
    for fault in allgather(next(filter(None, faults), ""), "check_replicas"):
        if fault:
            raise ValueError(fault)
    lines = [f"'{name}' {_digest(data_of(p)[0])}" for name, p in found.items()]
    check_equal("parameters", lines, "Call distributed.broadcast_parameters(net).")


def _difference_of_contexts(name, parameter):
    """Return an error text, or None if a parameter is equal on all contexts."""
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
