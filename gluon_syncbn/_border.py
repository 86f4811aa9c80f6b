"""Where the caller's graph of a parallel net ends and the devices' graphs begin.

Called by ``_backward.py``. Both classes put the devices' outputs into the caller's
graph, learn of the gradients that arrive there, and live as long as that graph, because
MXNet keeps the `autograd.Function` that refers to the call until it frees the graph.
"""

import ctypes
import threading
import time

import mxnet as mx
from mxnet import autograd

from . import _tracing, failures


def is_recorded(array):
    """Whether `array` is a result that `autograd` records, or has a gradient."""
    if not isinstance(array, mx.nd.NDArray):
        return False
    library, symbol = mx.base._LIB, ctypes.c_void_p()
    if library.MXAutogradGetSymbol(array.handle, ctypes.byref(symbol)) != 0:
        return False
    library.NNSymbolFree(symbol)
    return True


def join(parts, axis, context):
    """The parts of one output as a whole; the first of what are no arrays."""
    if not isinstance(parts[0], mx.nd.NDArray):
        return parts[0]
    return _concatenate([part.as_in_context(context) for part in parts], axis)


def _concatenate(arrays, axis):
    if len(arrays) == 1:
        return arrays[0]
    if isinstance(arrays[0], mx.np.ndarray):
        return mx.np.concatenate(arrays, axis=axis)
    return mx.nd.concat(*arrays, dim=axis)


class Leaves:
    """For inputs that have no gradient: outputs are leaves of the caller's graph.

    Nothing is waited for: the leaves' gradients are arrays that will be computed.
    """

    def __init__(self, context, axis):
        self._context, self._axis = context, axis
        self._leaves = []  # per device one for each output

    def attach(self, call, columns, _inputs):
        """The outputs as whole arrays in the caller's graph, which keeps `call`."""
        anchor = mx.nd.zeros((1,), ctx=self._context)
        anchor.attach_grad()
        zero = _Keeper(call)(anchor)
        with autograd.pause():
            columns = [[self._leaf(part) for part in column] for column in columns]
        self._leaves = list(zip(*columns))
        outputs = []
        for *others, last in columns:
            link = zero.astype(last.dtype).reshape((1,) * last.ndim)
            if isinstance(last, mx.np.ndarray):
                link = link.as_np_ndarray()
            outputs.append(_concatenate([*others, last + link], self._axis))
        return outputs

    def _leaf(self, part):
        leaf = part.detach().as_in_context(self._context)
        empty = mx.np.empty if isinstance(leaf, mx.np.ndarray) else mx.nd.empty
        gradient = empty(leaf.shape, ctx=self._context, dtype=leaf.dtype)
        autograd.mark_variables([leaf], [gradient])
        return leaf

    def reached(self):
        return any(leaf._fresh_grad for leaves in self._leaves for leaf in leaves)

    def take(self):
        """Per device the gradients of its outputs, None where none arrived."""
        gradients = [
            [leaf.grad if leaf._fresh_grad else None for leaf in leaves]
            for leaves in self._leaves
        ]
        for leaves in self._leaves:
            for leaf in leaves:
                leaf._fresh_grad = False
        return gradients

    def break_off(self, error):
        """There is nobody who waits."""


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
    """For inputs that have a gradient: inputs and outputs join in one function.

    Its backward runs on a thread of MXNet's for custom operators once the gradients of
    the outputs are computed. It hands them over, and waits there until the devices'
    backward is queued; so `take` waits in the caller. Leaves beside the function
    would not do: MXNet might queue what needs the inputs' gradients before what
    computes the leaves', and share resources between the two.
    """

    def __init__(self, context, axis):
        self._context, self._axis = context, axis
        self._arrived = self._given = None
        self.is_closed = False  # by autograd.grad

    def attach(self, call, columns, inputs):
        """The outputs as whole arrays in the caller's graph, which keeps `call`."""
        self._rows = [part.shape[self._axis] for part in columns[0]]
        self._anchor = mx.nd.zeros((1,), ctx=self._context)
        self._anchor.attach_grad()
        with autograd.pause():
            parts = [[part.detach() for part in column] for column in columns]
            wholes = [join(column, self._axis, self._context) for column in parts]
        # A function's gradient cannot be added to that of a leaf, a copy's can; and a
        # function has all its inputs on one context.
        inputs = [
            mx.nd.identity(x.as_nd_ndarray()).as_in_context(self._context)
            for x in inputs
        ]
        outputs = _Function(call, self, wholes)(self._anchor, *inputs)
        if isinstance(wholes[0], mx.np.ndarray):
            outputs = [output.as_np_ndarray() for output in outputs]
        return outputs

    def reached(self):
        return self._anchor._fresh_grad

    def has_arrived(self):
        return self._arrived is not None

    def take(self):
        """Per device the gradients of its outputs, which have arrived."""
        self._anchor._fresh_grad = False
        wholes, self._arrived = self._arrived, None
        return list(zip(*map(self._split, wholes)))

    def give(self, gradients):
        """Lets the function return; per input the gradients of its shards.

        To be called from a device's thread. In the caller's, joining them could be made
        to wait for a resource of MXNet's that a part of the caller's graph holds, which
        waits for these gradients.
        """
        gradients = [[part.as_nd_ndarray() for part in parts] for parts in gradients]
        self._give([join(parts, self._axis, self._context) for parts in gradients])

    def break_off(self, error):
        """Lets the function fail."""
        self._give(mx.MXNetError(f"the backward of a parallel net failed: {error}"))

    def backward(self, gradients):
        """Called by MXNet's thread with the outputs' gradients."""
        if self.is_closed:
            raise mx.MXNetError(
                "autograd.grad does not go through a parallel net: attach gradients, "
                "and call backward"
            )
        with _changed:
            self._arrived = gradients
            _changed.notify_all()
        given = _await(lambda: self._given)
        self._given = None
        if isinstance(given, mx.MXNetError):
            raise given
        return [mx.nd.zeros_like(self._anchor), *given]

    def _give(self, gradients):
        with _changed:
            self._given = gradients
            _changed.notify_all()

    def _split(self, dy):
        parts, begin = [], 0
        for rows in self._rows:
            parts.append(dy.slice_axis(self._axis, begin, begin + rows))
            begin += rows
        return parts


class _Function(autograd.Function):
    def __init__(self, call, gate, outputs):
        super().__init__()
        self._call, self._gate, self._outputs = call, gate, outputs

    def __call__(self, *inputs):
        # MXNet hands gradients to it as it does to every asynchronous operator.
        return [_tracing.plain_gradient(y) for y in super().__call__(*inputs)]

    def forward(self, *inputs):
        outputs, self._outputs = self._outputs, None
        return [output.as_nd_ndarray() for output in outputs]

    def backward(self, *gradients):
        return self._gate.backward(gradients)


_changed = threading.Condition()  # guards what gates have got
_TICK = 0.2  # seconds between looks for a failure


def await_any(gates):
    """The first of some gates where gradients have arrived."""

    def arrived():
        return next((gate for gate in gates if gate.has_arrived()), None)

    return _await(arrived)


def _await(condition):
    """Waits until `condition()` gives something, and returns it.

    Raises MXNetError if a layer fails, or nothing comes within the timeout.
    """
    deadline = time.monotonic() + failures.get_timeout()
    with _changed:
        while True:
            thing = condition()
            if thing is not None:
                return thing
            if failures.failure():
                raise mx.MXNetError(failures.failure())
            if time.monotonic() > deadline:
                raise mx.MXNetError(
                    f"a parallel net's backward waited {failures.get_timeout()} s for "
                    "gradients; likely cause: an error in the loss's own backward"
                )
            _changed.wait(_TICK)
