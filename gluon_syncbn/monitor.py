"""A table of what devices wait for.

Layers count their waits, and MXNet writes when gradients are ready: nothing blocks.
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

_NEGLIGIBLE = 0.05  # smaller shares are not worth a hint
_written: list = []  # times that MXNet may still write


class Monitor:
    """Measure how long each device waits for data, and for other devices.

    Parameters
    ----------
    net : mxnet.gluon.Block
        Its SyncBatchNorm layers count how long devices wait in them.

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
        # These keep native layers alive where blocks are converted or reverted.
        self._layers = [x._sync for x in synchronized_layers(net)]
        self._pending = collections.deque()  # of steps: asked, got, {device: finished}
        self._finished: dict = {}  # when each device had finished the step before
        self._begin()

    def data(self, batches: Iterable) -> Iterator:
        """Yield the batches, of a DataLoader for example; a step lasts until the next.

        TypeError if `batches` is no iterable.
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
        """Return a table of the time since the last report, in shares of each device.

        Steps that devices are still busy with count in the next report.
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
            longest = [
                f"{n} {share:.0%}" for n, share in layers.most_common(2) if share
            ]
            share = f"{data[device]:14.0%}  {sum(layers.values()):10.0%}"
            lines.append(f"{device:6}  {share}  {', '.join(longest)}".rstrip())
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
                # A device that is still busy when the batch is asked for waits less.
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
        """Return by device the time when its work is done; 0 until MXNet writes it."""
        arrays = collections.defaultdict(list)
        for parameter in self._net.collect_params().values():
            for array in (*data_of(parameter), *gradients_of(parameter)):
                arrays[array.context].append(array)
        times = {context: ctypes.c_double() for context in arrays}
        _written[:] = [end for end in _written if not end.value] + [*times.values()]
        for context, end in times.items():
            note = load().gluon_syncbn_note_time
            push(note, ctypes.addressof(end), context, arrays[context])
        return {str(context): end for context, end in times.items()}


def _hint(data, others):
    """Return in words what holds the devices back most."""
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
