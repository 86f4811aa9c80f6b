"""Monitor, which measures how long devices wait, without blocking them.

Layers count the time that they wait. MXNet's engine writes the time when gradients are
ready.
"""

from __future__ import annotations

import collections
import ctypes
import time
from collections.abc import Iterable, Iterator

import mxnet as mx

from .arguments import check_block, check_type
from .layer.finding import synchronized_layers
from .mxnet_private.arrays import push
from .mxnet_private.parameters import contexts_of, data_of, gradients_of
from .native.library import load

_NEGLIGIBLE = 0.05  # a smaller fraction of the time needs no hint
_pending_times: list = []  # the engine may still write to these


class Monitor:
    """Measurement of how long each device waits for data and for other devices.

    It never blocks.

    Parameters
    ----------
    net : mxnet.gluon.Block
        The net, with its SyncBatchNorm layers.

    Raises
    ------
    TypeError
        If `net` is not a Block.

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
        # These keep the native layers alive if blocks are converted or reverted.
        self._layers = [x._sync for x in synchronized_layers(net)]
        self._pending = collections.deque()  # (asked, got, {device: finished}) by step
        self._finished: dict = {}  # {device: the time when it finished its last step}
        self._begin()

    def data(self, batches: Iterable) -> Iterator:
        """Yield the batches of an iterable such as a DataLoader.

        A step ends when the next batch is requested.
        """
        types = Iterable, mx.gluon.data.Dataset
        check_type("batches", batches, types, "an iterable")
        asked = time.monotonic()
        for batch in batches:
            got = time.monotonic()
            yield batch
            self._pending.append((asked, got, self._finish_times()))
            self._collect()
            asked = time.monotonic()

    def report(self) -> str:
        """Return a table of the time that each device waited since the last report.

        A step that is not finished on all devices counts in the next report.
        """
        self._collect()
        seconds = max(time.monotonic() - self._began, 1e-9)
        data = {device: self._data[device] / seconds for device in self._devices()}
        others = {device: collections.Counter() for device in data}
        for (device, layer), total in self._waits().items():
            before = self._before.get((device, layer), 0)
            others[device][layer] += (total - before) / seconds
        lines = ["device  waits for data  for others  most of all in"]
        for device, layers in others.items():
            longest = [f"{n} {part:.0%}" for n, part in layers.most_common(2) if part]
            parts = f"{data[device]:14.0%}  {sum(layers.values()):10.0%}"
            lines.append(f"{device:6}  {parts}  {', '.join(longest)}".rstrip())
        hint = _hint(data, others)
        lines.append(f"{self._steps} steps in {seconds:.3g} s: {hint}")
        self._begin()
        return "\n".join(lines)

    def _begin(self):
        self._began, self._before = time.monotonic(), self._waits()
        self._steps, self._data = 0, collections.Counter()

    def _collect(self):
        """Count the steps that all devices have finished."""
        while self._pending and all(t.value for t in self._pending[0][2].values()):
            asked, got, finished = self._pending.popleft()
            for device, end in finished.items():
                # A device that is busy when the batch is requested waits less.
                begin = max(asked, self._finished.get(device, 0))
                self._data[device] += max(0.0, got - begin)
                self._finished[device] = end.value
            self._steps += 1

    def _devices(self):
        parameters = self._net.collect_params().values()
        return sorted({str(c) for p in parameters for c in contexts_of(p)})

    def _waits(self):
        waits = load().gluon_syncbn_wait_seconds
        return {
            (device, layer.name): waits(layer.key, device)
            for device in self._devices()
            for layer in self._layers
        }

    def _finish_times(self):
        """Return {device: time when its work is done}; 0 until the engine writes it."""
        arrays = collections.defaultdict(list)
        for parameter in self._net.collect_params().values():
            for array in (*data_of(parameter), *gradients_of(parameter)):
                arrays[array.context].append(array)
        times = {context: ctypes.c_double() for context in arrays}
        _pending_times[:] = [end for end in _pending_times if not end.value]
        _pending_times.extend(times.values())
        for context, end in times.items():
            note = load().gluon_syncbn_note_time
            push(note, ctypes.addressof(end), context, arrays[context])
        return {str(context): end for context, end in times.items()}


def _hint(data, others):
    """Return a sentence about the longest wait."""
    waits = {device: sum(layers.values()) for device, layers in others.items()}
    longest = max(waits.values(), default=0)
    for_data = max(data.values(), default=0)
    if max(for_data, longest) < _NEGLIGIBLE:
        return "nothing holds the devices back for long"
    if for_data > longest:
        return "all wait for data: give the loader more workers or faster storage"
    slow = min(waits, key=lambda device: waits[device])
    awaited = slow if waits[slow] < longest / 2 else "each other"
    layer = sum(others.values(), collections.Counter()).most_common(1)[0][0]
    return f"devices wait for {awaited}, most of all in {layer}"
