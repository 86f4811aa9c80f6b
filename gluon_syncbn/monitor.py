"""Measure how long devices wait, without blocking them."""

from __future__ import annotations

import ctypes
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import mxnet as mx

from .arguments import check_block
from .layer.finding import synchronized_layers
from .mxnet_private.arrays import push
from .mxnet_private.parameters import contexts_of, data_of, gradients_of
from .native.library import load

_pending_times: list = []  # times that the engine has not written yet


class Monitor:
    """Measurement of the time that devices wait for data and for each other.

    Parameters
    ----------
    net : mxnet.gluon.Block
        The net, with its SyncBatchNorm layers.

    Examples
    --------
    >>> from gluon_syncbn import Monitor, make_parallel
    >>> import mxnet as mx
    >>> net = make_parallel(mx.gluon.nn.BatchNorm(), ctx=[mx.cpu(0), mx.cpu(1)])
    >>> net.initialize()
    >>> monitor = Monitor(net)
    >>> for x in monitor.data([mx.nd.ones((4, 2))] * 3):
    ...     with mx.autograd.record():
    ...         loss = net(x).sum()
    ...     loss.backward()
    >>> mx.nd.waitall()
    >>> print(monitor.report())  # doctest: +ELLIPSIS
    device  waits for data  for others  most of all in
    cpu(0) ...
    cpu(1) ...
    3 steps in ... s: ...
    """

    def __init__(self, net: mx.gluon.Block) -> None:
        self._net = check_block("net", net)
        # These references keep the native layers, with their times, after a revert.
        self._layers = [x._sync for x in synchronized_layers(net)]
        self._begin()

    def data(self, batches: Iterable) -> Iterator:
        """Yield the batches. A request for the next batch ends a step."""
        asked, finished = time.monotonic(), self._finish_times()
        for batch in batches:
            got = time.monotonic()
            for device, end in finished.items():
                if end.value:  # a device that is still busy does not wait
                    self._data[device] += max(0.0, got - max(asked, end.value))
            yield batch
            self._steps += 1
            asked, finished = time.monotonic(), self._finish_times()

    def report(self) -> str:
        """Return a table of the time that each device waited since the last report."""
        seconds, now = time.monotonic() - self._began, self._layer_waits()
        others = {d: waits - self._before.get(d, Counter()) for d, waits in now.items()}
        lines = ["device  waits for data  for others  most of all in"]
        for device, layers in others.items():
            for_data, for_others = self._data[device], sum(layers.values())
            shares = f"{for_data / seconds:14.0%}  {for_others / seconds:10.0%}"
            longest = [f"{n} {wait / seconds:.0%}" for n, wait in layers.most_common(2)]
            lines.append(f"{device:6}  {shares}  {', '.join(longest)}".rstrip())
        hint = _hint(self._data, others, negligible=0.05 * seconds)
        lines.append(f"{self._steps} steps in {seconds:.3g} s: {hint}")
        self._begin()
        return "\n".join(lines)

    def _begin(self):
        self._began, self._before = time.monotonic(), self._layer_waits()
        self._steps, self._data = 0, Counter()

    def _layer_waits(self):
        """Return {device: {layer: seconds that the device has waited in it}}."""
        parameters, waits = self._net.collect_params().values(), {}
        seconds = load().gluon_syncbn_wait_seconds
        for device in sorted({str(c) for p in parameters for c in contexts_of(p)}):
            found = {layer.name: seconds(layer.key, device) for layer in self._layers}
            waits[device] = Counter(found)
        return waits

    def _finish_times(self):
        """Return {device: time when its work ends}, which the engine writes later."""
        arrays, times = defaultdict(list), {}
        for parameter in self._net.collect_params().values():
            for array in (*data_of(parameter), *gradients_of(parameter)):
                arrays[array.context].append(array)
        _pending_times[:] = [end for end in _pending_times if not end.value]
        for context, read in arrays.items():
            times[str(context)] = end = ctypes.c_double()
            _pending_times.append(end)
            push(load().gluon_syncbn_note_time, ctypes.addressof(end), context, read)
        return times


def _hint(data, others, negligible):
    waits = {device: sum(layers.values()) for device, layers in others.items()}
    longest = max(waits.values(), default=0)
    for_data = max(data.values(), default=0)
    if max(for_data, longest) < negligible:
        return "nothing holds the devices back for long"
    if for_data > longest:
        return "all wait for data: give the loader more workers or faster storage"
    slow = min(waits, key=lambda device: waits[device])
    awaited = slow if waits[slow] < longest / 2 else "each other"
    layer = sum(others.values(), Counter()).most_common(1)[0][0]
    return f"devices wait for {awaited}, most of all in {layer}"
