"""Bridges between the caller's graph of a parallel net and the devices' graphs.

Called by ``backward.py``. Both classes put the devices' outputs into the caller's
graph, receive the gradients of these, and live as long as that graph, because MXNet
keeps the `autograd.Function` that refers to the call until it frees the graph.
Both have `variables`, by name, with respect to which the caller's backward
differentiates, and `name`, the name of a variable that every output depends on.
"""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace
from typing import Any, Iterable, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd

from ..layer import layout_guard
from ..mxnet_private.graphs import name_of
from ..mxnet_private.operators import (
    broadcast_add,
    cast,
    concat,
    copy,
    reshape,
    slice_axis,
    to_context,
)
from ..native import failures
from .batch import Batch


def join(shards: Sequence, axis: int | None, context: mx.Context) -> Any:
    """The shards of one output as a whole; if they are no arrays, the first one."""
    if not isinstance(shards[0], mx.nd.NDArray):
        return shards[0]
    return _concatenate([to_context(shard, context) for shard in shards], axis)


def _concatenate(arrays, axis):
    if len(arrays) == 1:
        return arrays[0]
    if isinstance(arrays[0], mx.np.ndarray):
        return mx.np.concatenate(arrays, axis=axis)
    return concat(*arrays, dim=axis)


class Leaves:
    """A bridge for inputs without gradients: outputs are leaves of the caller's graph.

    Nothing is waited for: the leaves' gradients are arrays that will be computed.
    """

    def __init__(self, batch: Batch) -> None:
        self._context, self._axis = batch.contexts[0], batch.axis
        self.variables: dict = {}
        self._names: list = []  # per device those of the leaves for each output

    def attach(self, call: Any, columns: Sequence) -> list:
        """The outputs as whole arrays in the caller's graph, which keeps `call`.

        `columns` has for each output a list of its shards.
        """
        anchor = mx.nd.zeros((1,), ctx=self._context)
        anchor.attach_grad()
        self.name = name_of(anchor)
        zero = _Keeper(call)(anchor)
        with autograd.pause():
            columns = [[self._leaf(shard) for shard in column] for column in columns]
        names = [[name_of(leaf) for leaf in column] for column in columns]
        self._names = list(zip(*names))
        for column_names, column in zip(names, columns):
            self.variables.update(zip(column_names, column))
        outputs = []
        for *others, last in columns:
            link = reshape(cast(zero, last.dtype), shape=(1,) * last.ndim)
            if isinstance(last, mx.np.ndarray):
                last = last + link.as_np_ndarray()
            else:
                last = broadcast_add(last, link)
            outputs.append(_concatenate([*others, last], self._axis))
        return outputs

    def _leaf(self, shard):
        leaf = to_context(shard.detach(), self._context)
        empty = mx.np.empty if isinstance(leaf, mx.np.ndarray) else mx.nd.empty
        gradient = empty(leaf.shape, ctx=self._context, dtype=leaf.dtype)
        autograd.mark_variables([leaf], [gradient])
        return leaf

    def collect(self, gradients: dict) -> list:
        """Per device the gradients of its outputs, None where none arrived.

        `gradients` has those of the variables that a backward has reached.
        """
        return [[gradients.get(name) for name in names] for names in self._names]

    def cancel(self, error: BaseException) -> None:
        """Does nothing: no thread waits."""


class _Keeper(autograd.Function):
    """Zero; MXNet keeps it, and what it refers to, as long as the graph."""

    def __init__(self, call):
        super().__init__()
        self._call = call

    def forward(self, anchor):
        return mx.nd.zeros_like(anchor)

    def backward(self, dy):
        return mx.nd.zeros_like(dy)


class Gate:
    """A bridge for inputs with gradients: inputs and outputs join in one function.

    Its backward runs on a thread of MXNet for custom operators once the gradients of
    the outputs are computed. It hands them over, and waits until the devices'
    backward is queued; so `collect` waits in the caller. Leaves beside the function
    would not do: MXNet might queue what needs the inputs' gradients before what
    computes the leaves', and share resources between the two.
    """

    def __init__(self, batch: Batch) -> None:
        self._context, self._axis = batch.contexts[0], batch.axis
        self._rows, self._inputs = batch.rows, [x for x, _ in batch.differentiable]
        self.arrived: list = []  # runs of the function's backward, oldest first
        self._collected: Any  # the run whose gradients the caller has
        self._error: str | None = None

    def attach(self, call: Any, columns: Sequence) -> list:
        """The outputs as whole arrays in the caller's graph; see :class:`Leaves`."""
        inputs, self._inputs = self._inputs, []
        self._np_shape = mx.util.is_np_shape()  # MXNet's threads do not know it
        anchor = mx.nd.zeros((1,), ctx=self._context)
        anchor.attach_grad()
        self.name = name_of(anchor)
        self.variables = {self.name: anchor}
        with autograd.pause():
            columns = [[shard.detach() for shard in column] for column in columns]
            wholes = [join(column, self._axis, self._context) for column in columns]
        is_double = any(x.dtype == np.float64 for x in inputs)
        self._dtype = np.float64 if is_double else np.float32
        inputs = [to_context(x.as_nd_ndarray(), self._context) for x in inputs]
        outputs = _Function(call, self, wholes)(self._flat([anchor, *inputs]))
        if isinstance(wholes[0], mx.np.ndarray):
            outputs = [output.as_np_ndarray() for output in outputs]
        return outputs

    def _flat(self, arrays):
        """All in one array, of which the function computes the gradient.

        MXNet's functions stop writing gradients at the first one that is not asked for,
        and do not add to the gradients of leaves. That of this array is always asked
        for, because the anchor is in it, and written.
        """
        flat = [reshape(cast(x, self._dtype), shape=(-1,)) for x in arrays]
        return concat(*flat, dim=0)

    def collect(self, _gradients: dict) -> list:
        """Per device the gradients of its outputs, which have arrived."""
        self._collected = self.arrived.pop(0)
        return self._collected.gradients

    def deliver(self, gradients: Sequence) -> None:
        """Lets the function return; `gradients` has for each input those of its shards.

        To be called from a device's thread. In the caller's, joining them could be made
        to wait for a resource of MXNet that a node of the caller's graph holds, which
        waits for these gradients.
        """
        wholes = [mx.nd.zeros((1,), ctx=self._context)]
        for shards in gradients:
            shards = [shard.as_nd_ndarray() for shard in shards]
            wholes.append(join(shards, self._axis, self._context))
        flat = self._flat(wholes)
        with _changed:
            self._collected.delivered = flat
            _changed.notify_all()

    def cancel(self, error: BaseException) -> None:
        """Lets the function fail."""
        with _changed:
            self._error = f"the backward of a parallel net failed: {error}"
            _changed.notify_all()

    def backward(self, gradients: Sequence) -> mx.nd.NDArray:
        """Called by MXNet's thread with the outputs' gradients.

        MXNet frees them when this returns or raises, whoever still reads them. So the
        caller gets copies, and these are complete.
        """
        with mx.util.np_shape(self._np_shape):
            columns = list(map(self._split, gradients))
        for shard in itertools.chain(*columns):
            shard.wait_to_read()
        this = SimpleNamespace(gradients=list(zip(*columns)), delivered=None)
        with _changed:
            self.arrived.append(this)
            _changed.notify_all()
        _await(lambda: self._error if this.delivered is None else True)
        if this.delivered is None:
            raise mx.MXNetError(self._error)
        return this.delivered

    def _split(self, dy):
        if len(self._rows) < 2:
            return [copy(dy, self._context)]
        shards, begin = [], 0
        for rows in self._rows:
            shards.append(slice_axis(dy, self._axis, begin, begin + rows))
            begin += rows
        return shards


class _Function(autograd.Function):
    def __init__(self, call, gate, outputs):
        super().__init__()
        self._call, self._gate, self._outputs = call, gate, outputs

    def __call__(self, inputs):
        # MXNet hands gradients to it as it does to every asynchronous operator.
        return [layout_guard.plain_gradient(y) for y in super().__call__(inputs)]

    def forward(self, inputs):
        outputs, self._outputs = self._outputs, None
        return [output.as_nd_ndarray() for output in outputs]

    def backward(self, *gradients):
        return self._gate.backward(gradients)


_changed = threading.Condition()  # guards the gradients in gates
_TICK = 0.2  # seconds between looks for a failure
_STOPPED = 1.0  # seconds that a look is late only where the process was stopped


def await_any(gates: Iterable[Gate], recovery: object) -> Gate:
    """The first of some gates where gradients have arrived.

    `recovery` was `failures.latest_recovery` before the backward. One since then, in
    another thread, gave up what would bring the gradients, and cleared the failure.
    """
    return _await(
        lambda: next((gate for gate in gates if gate.arrived), None), recovery
    )


def _await(condition, recovery=None):
    """Waits until `condition()` returns something else than None, and returns it.

    Raises MXNetError if a layer fails, or nothing arrives within the timeout.
    """
    deadline = time.monotonic() + failures.get_timeout()
    with _changed:
        while True:
            thing = condition()
            if thing is not None:
                return thing
            _raise_failure(recovery)
            if time.monotonic() > deadline:
                raise mx.MXNetError(
                    f"a parallel net's backward waited {failures.get_timeout()} s for "
                    "gradients; likely cause: an error in the loss's own backward"
                )
            asleep = time.monotonic()
            _changed.wait(_TICK)
            late = time.monotonic() - asleep - _TICK
            if late > _STOPPED:  # nothing could arrive in that time
                deadline += late


def _raise_failure(recovery):
    failure = failures.failure()
    if failure:
        raise failures.error(failure)
    if recovery not in (None, failures.latest_recovery):
        raise mx.MXNetError(
            "a parallel net's backward was given up by another thread, which called "
            f"gluon_syncbn.recover ({failures.latest_recovery[2]})"
        )
