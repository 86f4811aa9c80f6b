"""Measures how long devices sit idle, and what they wait for.

Called by users' training loops. It waits for nothing: layers count their own waits, and
MXNet notes the times when gradients and parameters are ready.
"""

from __future__ import annotations

import collections
import collections.abc
import ctypes
import time
from typing import Iterable, Iterator

import mxnet as mx

from .common.arguments import check_block, check_kind
from .layer.symbol_blocks import synchronized_layers
from .native import engine
from .native.library import load

_TOP = 5
_NEGLIGIBLE = 0.05  # shares below it hold nobody back
_HINTS = {
    "data": "devices wait for data: give the loader more workers or faster storage",
    "each_other": "devices wait for each other, most of all in {layer}: their shards "
    "or speeds are unequal, or they share processors",
    "gradients": "devices wait for gradients: let each step do more work (a larger "
    "batch), or try another kvstore",
}


class Monitor:
    """Measures what devices wait for: data, each other, and gradients.

    Parameters
    ----------
    net : mxnet.gluon.Block
        Its SyncBatchNorm layers count how long devices wait in them.
    trainer : mxnet.gluon.Trainer
        Inside of the ``with`` block its `step`, or `allreduce_grads` and `update`, are
        observed.

    Examples
    --------
    >>> import mxnet as mx
    >>> from mxnet import autograd, gluon
    >>> from gluon_syncbn import Monitor, make_parallel
    >>> net = make_parallel(gluon.nn.BatchNorm(), ctx=[mx.cpu(0), mx.cpu(1)])
    >>> net.initialize()
    >>> trainer = gluon.Trainer(net.collect_params(), "sgd")
    >>> with Monitor(net, trainer) as monitor:
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
    waited for data ... %, for each other ... %, for gradients ... %
    """

    def __init__(self, net: mx.gluon.Block, trainer: mx.gluon.Trainer) -> None:
        check_block("net", net)
        check_kind("trainer", trainer, mx.gluon.Trainer, "a gluon.Trainer")
        self._trainer, self._former, self._is_within = trainer, None, False
        self._layers = synchronized_layers(net)
        self._steps = collections.deque()  # steps that devices may be busy with
        self._noted = []  # arrays of times that MXNet may still write to
        self._finished = None  # when each device had finished the step before
        self._begin()

    def __enter__(self):
        self._former, self._is_within = {}, True
        # Trainer.step calls both, and so do allreduce_grads and update.
        self._replace("_allreduce_grads", self._allreduce_grads)
        self._replace("_update", self._update)
        self._begin()
        return self

    def __exit__(self, *exception):
        self._is_within = False
        for name, former in self._former.items():
            delattr(self._trainer, name)
            if former is not None:
                setattr(self._trainer, name, former)
        mx.nd.waitall()  # MXNet writes the times into memory of this object

    def _replace(self, name, method):
        """Lets the trainer call `method`, with the method of that name first."""
        self._former[name] = vars(self._trainer).get(name)
        original = getattr(self._trainer, name)
        setattr(self._trainer, name, lambda *args: method(original, *args))

    def _allreduce_grads(self, original):
        if self._steps:
            self._steps[-1].ready.append(self._note_time("list_grad"))
        original()

    def _update(self, original, *args):
        original(*args)
        if self._steps:
            self._steps[-1].updated.append(self._note_time("list_data"))

    def _check_entered(self, method, is_observed):
        if not is_observed:
            when = "before" if self._former is None else "after"
            raise RuntimeError(
                f"Monitor.{method} was called {when} the monitor's with block, which "
                "observes the trainer; expected `with Monitor(net, trainer) as ...:`"
            )

    def data(self, batches: Iterable) -> Iterator:
        """Yields the batches; a step lasts from one to the next.

        Parameters
        ----------
        batches : iterable
            For example a DataLoader.

        Raises
        ------
        RuntimeError
            Before or after the ``with`` block.
        """
        self._check_entered("data", self._is_within)
        kinds = collections.abc.Iterable, mx.gluon.data.Dataset
        check_kind("batches", batches, kinds, "an iterable")
        return self._observed(iter(batches))

    def _observed(self, iterator):
        while True:
            step = _Step(asked=time.monotonic())
            try:
                batch = next(iterator)
            except StopIteration:
                return
            step.got = time.monotonic()
            self._steps.append(step)
            yield batch
            self._collect()

    def report(self) -> Waits:
        """The shares of time since the last report, or since the ``with`` block began.

        Steps that devices are still busy with count in the next report.

        Returns
        -------
        Waits

        Raises
        ------
        RuntimeError
            Before the ``with`` block.
        """
        self._check_entered("report", self._former is not None)
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
            gradients=self._gradients / whole,
            layers=sorted(layers, key=lambda item: -item[1])[:_TOP],
        )
        self._begin()
        return report

    def _begin(self):
        self._began, self._waits_before = time.monotonic(), self._layer_waits()
        self._count, self._data, self._gradients, self._devices = 0, 0.0, 0.0, 1

    def _collect(self):
        """Adds up the steps that all devices have finished."""
        self._noted = [times for times in self._noted if not all(times)]
        while self._steps:
            step = self._steps[0]
            if step.is_finished():
                self._add(step)
            elif step.updated or len(self._steps) == 1:
                return
            # Otherwise the loop has begun the next step without an update.
            self._steps.popleft()

    def _add(self, step):
        self._devices = len(step.updated[-1])
        finished = self._finished or [0.0] * self._devices
        # A device that is still busy when the batch is asked for waits less.
        self._data += sum(max(0.0, step.got - max(step.asked, t)) for t in finished)
        for ready, updated in zip(step.ready, step.updated):
            self._gradients += sum(updated) - sum(ready)
        self._finished = list(step.updated[-1])
        self._count += 1

    def _layer_waits(self):
        seconds = load().gluon_syncbn_wait_seconds
        return [
            sum(seconds(key.encode()) for key, _ in layer.meetings())
            for layer in self._layers
        ]

    def _note_time(self, arrays):
        """For each device the time when all its arrays are ready: 0 until then."""
        parameters = [p for p in self._trainer._params if p.grad_req != "null"]
        columns = list(zip(*(getattr(p, arrays)() for p in parameters)))
        times = (ctypes.c_double * len(columns))()
        self._noted.append(times)
        for k, column in enumerate(columns):
            address = ctypes.addressof(times) + k * ctypes.sizeof(ctypes.c_double)
            engine.note_time(address, column[0].context, column)
        return times


class _Step:
    """Times of one step in seconds; those that MXNet notes are 0 until it has."""

    def __init__(self, asked):
        self.asked, self.got = asked, None
        # For each update, per device: when gradients and parameters were ready.
        self.ready, self.updated = [], []

    def is_finished(self):
        noted = [*self.ready, *self.updated]
        return len(self.updated) > 0 and all(all(times) for times in noted)


class Waits(
    collections.namedtuple(
        "Waits", "steps seconds data each_other gradients layers", defaults=[()]
    )
):
    """Shares of their time (0 to 1) that devices waited, by what they waited for.

    Attributes
    ----------
    steps : int
        Steps that were finished.
    seconds : float
    data, each_other, gradients : float
        Shares of the time that the average device waited: for a batch, in
        SyncBatchNorm layers for other devices, from its own gradients being ready to
        the updated parameters.
    layers : list of (str, float)
        The five layers where devices waited longest for each other, with the shares.

    Examples
    --------
    >>> from gluon_syncbn.monitor import Waits
    >>> waits = Waits(100, 20.0, data=0.31, each_other=0.04, gradients=0.02)
    >>> print(waits)
    waited for data 31 %, for each other 4 %, for gradients 2 %
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
        return (
            f"waited for data {self.data:.0%}, for each other {self.each_other:.0%}, "
            f"for gradients {self.gradients:.0%}".replace("%", " %")
        )
