"""Measures how long devices sit idle, and what they wait for.

It waits for nothing: layers count their waits, and MXNet notes when gradients are
ready. It must not know who drives the devices.
"""

from __future__ import annotations

import collections
import collections.abc
import ctypes
import time
from typing import Iterable, Iterator

import mxnet as mx

from ..common.arguments import check_block, check_type
from ..layer.finding import synchronized_layers
from ..mxnet_private.library import push
from ..mxnet_private.parameters import data_of, gradients_of
from ..native.library import load

_TOP = 5
_NEGLIGIBLE = 0.05  # smaller shares are not worth a hint
_HINTS = {
    "data": "devices wait for data: give the loader more workers or faster storage",
    "each_other": "devices wait for each other, most of all in {layer}: their shards "
    "or speeds are unequal, or they share processors",
}

# One step: when the loop asked for its batch and got it, in seconds, and for each
# device when it had finished the step, 0 until MXNet has noted that.
_Step = collections.namedtuple("_Step", "asked got finished")


class Monitor:
    """Measures what devices wait for: data, and each other.

    Parameters
    ----------
    net : mxnet.gluon.Block
        Its SyncBatchNorm layers count how long devices wait in them.

    Examples
    --------
    >>> from gluon_syncbn import Monitor, make_parallel
    >>> import mxnet as mx
    >>> from mxnet import autograd, gluon
    >>> net = make_parallel(gluon.nn.BatchNorm(), ctx=[mx.cpu(0), mx.cpu(1)])
    >>> net.initialize()
    >>> trainer = gluon.Trainer(net.collect_params(), "sgd")
    >>> with Monitor(net) as monitor:
    ...     for x in monitor.data([mx.nd.ones((4, 2))] * 3):
    ...         with autograd.record():
    ...             loss = net(x).sum()
    ...         loss.backward()
    ...         trainer.step(4)
    ...     mx.nd.waitall()
    ...     waits = monitor.report()
    >>> waits.steps
    3
    >>> print(waits)  # doctest: +ELLIPSIS
    waited for data ... %, for each other ... %
    """

    def __init__(self, net: mx.gluon.Block) -> None:
        check_block("net", net)
        self._net = net
        # These keep native layers alive where blocks are converted or reverted.
        self._layers = [x._sync for x in synchronized_layers(net)]
        self._when = "before"  # "within" or "after" the ``with`` block
        self._steps = collections.deque()  # steps that devices may be busy with
        self._finished = []  # when each device had finished the step before those

    def __enter__(self):
        self._when = "within"
        self._begin()
        return self

    def __exit__(self, *exception):
        self._when = "after"
        mx.nd.waitall()  # MXNet writes the times into memory of this object

    def _check(self, method, *allowed):
        if self._when not in allowed:
            raise RuntimeError(
                f"Monitor.{method} was called {self._when} the monitor's with block; "
                "expected `with Monitor(net) as ...:`"
            )

    def data(self, batches: Iterable) -> Iterator:
        """Yields the batches, of a DataLoader for example; a step lasts from one to the
        next. RuntimeError before or after the ``with`` block.
        """
        self._check("data", "within")
        types = collections.abc.Iterable, mx.gluon.data.Dataset
        check_type("batches", batches, types, "an iterable")
        return self._observed(iter(batches))

    def _observed(self, iterator):
        while True:
            asked = time.monotonic()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            got = time.monotonic()
            yield batch
            self._steps.append(_Step(asked, got, self._note_finished()))
            self._collect()

    def report(self) -> Waits:
        """The shares of time since the last report, or since the ``with`` block began.

        Steps that devices are still busy with count in the next report. RuntimeError
        before the ``with`` block.
        """
        self._check("report", "within", "after")
        self._collect()
        seconds = time.monotonic() - self._began
        whole = self._devices * max(seconds, 1e-9)
        pairs = zip(self._waits_before, self._layer_waits())
        shares = [(after - before) / whole for before, after in pairs]
        layers = zip((layer.name for layer in self._layers), shares)
        report = Waits(
            steps=self._count,
            seconds=seconds,
            data=self._data / whole,
            each_other=sum(shares),
            layers=sorted(layers, key=lambda item: -item[1])[:_TOP],
        )
        self._begin()
        return report

    def _begin(self):
        self._began, self._waits_before = time.monotonic(), self._layer_waits()
        self._count, self._data, self._devices = 0, 0.0, 1

    def _collect(self):
        """Adds up the steps that all devices have finished."""
        while self._steps and all(self._steps[0].finished):
            step = self._steps.popleft()
            self._devices = max(len(step.finished), 1)
            # A device that is still busy when the batch is asked for waits less.
            for before in self._finished or [0.0] * self._devices:
                self._data += max(0.0, step.got - max(step.asked, before))
            self._finished = list(step.finished)
            self._count += 1

    def _layer_waits(self):
        seconds = load().gluon_syncbn_wait_seconds
        return [seconds(layer.key) for layer in self._layers]

    def _note_finished(self):
        """For each device the time when all work on the net is done: 0 until then.

        In seconds of the monotonic clock, written by MXNet's threads.
        """
        arrays = []
        for parameter in self._net.collect_params().values():
            arrays += [*data_of(parameter), *gradients_of(parameter)]
        contexts = sorted({a.context for a in arrays}, key=str)
        times = (ctypes.c_double * len(contexts))()
        for k, context in enumerate(contexts):
            address = ctypes.addressof(times) + k * ctypes.sizeof(ctypes.c_double)
            read = [array for array in arrays if array.context == context]
            push(load().gluon_syncbn_note_time, address, context, read)
        return times


class Waits(
    collections.namedtuple(
        "Waits", "steps seconds data each_other layers", defaults=[()]
    )
):
    """Shares of their time (0 to 1) that devices waited, by what they waited for.

    Attributes
    ----------
    steps : int
        Steps that were finished.
    seconds : float
    data, each_other : float
        Shares of the time that the average device waited: for a batch, and in
        SyncBatchNorm layers for other devices.
    layers : list of (str, float)
        The five layers where devices waited longest for each other, with the shares.

    Examples
    --------
    >>> from gluon_syncbn.monitor import Waits
    >>> waits = Waits(100, 20.0, data=0.31, each_other=0.04)
    >>> print(waits)
    waited for data 31 %, for each other 4 %
    >>> print(waits.hint)
    devices wait for data: give the loader more workers or faster storage
    """

    __slots__ = ()

    @property
    def hint(self) -> str:
        """A sentence that says what holds the devices back most."""
        most = max(_HINTS, key=lambda name: getattr(self, name))
        if getattr(self, most) < _NEGLIGIBLE:
            return "nothing holds the devices back for long"
        return _HINTS[most].format(layer=self.layers[0][0] if self.layers else "")

    def __str__(self):
        text = f"waited for data {self.data:.0%}, for each other {self.each_other:.0%}"
        return text.replace("%", " %")
