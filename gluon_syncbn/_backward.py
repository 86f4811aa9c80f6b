"""Gradients of a parallel net: from one loss on one device back to all devices.

Called by ``parallel.py``. Two kinds of graphs meet here, which `autograd` keeps apart:

* the caller's, of what is computed from the gathered outputs, and perhaps of what the
  inputs were computed from. Its backward is pushed from the caller's thread;
* each device's, from its shard to its outputs. Its backward has to be pushed from the
  thread of its context (``devices.py`` says why).

MXNet has no hook between them, so the library's function for backward is wrapped: when
it has gone through the caller's graph, the gradients that arrived at the net's outputs
go on through the devices' graphs (``_border.py`` is where they arrive).
"""

import ctypes
import itertools
import threading
import weakref

import mxnet as mx
from mxnet import autograd

from ._border import Gate, Leaves, await_any, is_recorded, join
from ._nested import flatten, rebuild

_original = None
_numbers = itertools.count()
_calls = weakref.WeakSet()
_inside = threading.local()  # whether a thread is in the backward of a device


def gather(sharded, net):
    """The devices' outputs as whole arrays on the first context, and recorded there.

    Parameters
    ----------
    sharded : ShardedOutput
    net : ParallelNet
        Whose call it was.
    """
    columns = list(zip(*map(flatten, sharded)))  # per output its parts
    context, axis = net.devices.contexts[0], net.batch_axis
    for number, column in enumerate(columns):
        _check_rows(number, column, sharded.batch.shard_rows(), axis)
    recording = autograd.is_recording()
    recorded = [recording and is_recorded(column[0]) for column in columns]
    wholes = iter([])
    if any(recorded):
        in_graph = list(itertools.compress(columns, recorded))
        wholes = iter(_Call(sharded.batch, net).attach(in_graph, sharded.batch))
    leaves = [
        next(wholes) if is_in_graph else join(column, axis, context)
        for column, is_in_graph in zip(columns, recorded)
    ]
    return rebuild(sharded[0], iter(leaves))


def _check_rows(number, column, rows, axis):
    for part, expected in zip(column, rows):
        if not isinstance(part, mx.nd.NDArray):
            continue
        axis_there = -part.ndim <= axis < part.ndim
        if not axis_there or part.shape[axis] != expected:
            raise ValueError(
                f"output {number} has shape {part.shape} on {part.context}, expected "
                f"{expected} rows along axis {axis} as the input has there; what has "
                "no rows cannot be joined: use make_parallel(..., gather=False)"
            )


class _Call:
    """One recorded call of a parallel net, alive as long as the caller's graph is."""

    def __init__(self, batch, net):
        self.net = net
        self.parameters = batch.parameters
        self.number = next(_numbers)
        kind = Gate if batch.differentiable else Leaves
        self.border = kind(net.devices.contexts[0], net.batch_axis)
        self._heads = []  # per device its outputs
        self._shards = [shards for _, shards in batch.differentiable]

    def attach(self, columns, batch):
        """The outputs, given as columns of parts, as whole arrays of the caller."""
        self._heads = list(zip(*columns))
        _calls.add(self)
        _install()
        return self.border.attach(self, columns, [x for x, _ in batch.differentiable])

    def reached(self):
        """Whether a backward call has come to the outputs since the last one."""
        return self.border.reached()

    def go_on(self, retain_graph, train_mode):
        """Queues the devices' backward, and hands on the gradients of the inputs."""
        devices = self.net.devices

        def backward(heads, gradients, context):
            there = [k for k, gradient in enumerate(gradients) if gradient is not None]
            if there:
                with autograd.pause():
                    gradients = [gradients[k].as_in_context(context) for k in there]
                heads = [heads[k] for k in there]
                _inside.a_device = True
                try:
                    autograd.backward(heads, gradients, retain_graph, train_mode)
                finally:
                    _inside.a_device = False

        contexts = devices.contexts[: len(self._heads)]
        devices.map_first(backward, self._heads, self.border.take(), contexts)
        if self._shards:
            inputs = [[s.grad for s in shards] for shards in self._shards]
            devices.map_first(self.border.give, [inputs])

    def break_off(self, error):
        """Lets nobody wait for gradients that will not come."""
        self.border.break_off(error)
        self.release()

    def release(self):
        """Lets go of the devices' graphs."""
        self._heads = self._shards = []
        _calls.discard(self)


class _Gradients:
    """The parameters' gradients in one backward call, which may reach one often.

    Each graph that reaches a parameter with ``grad_req='write'`` overwrites what
    another one (of another call of the net, or the caller's own) has written.
    """

    def __init__(self, calls):
        parameters = {id(p): p for call in calls for p in call.parameters}
        self._replicas = [  # per parameter its data and gradients
            list(zip(p._data, p._grad))
            for p in parameters.values()
            if p.grad_req == "write" and p._grad is not None
        ]
        self._former = []
        for data, _ in self._all():
            if data._fresh_grad:
                self._former.append(data)
                data._fresh_grad = False

    def _all(self):
        return (pair for replicas in self._replicas for pair in replicas)

    def add(self, backward, *arguments):
        """Calls `backward`, and adds up what it and earlier ones have written."""
        saved = []
        for data, grad in self._all():
            if data._fresh_grad:
                saved.append((data, grad, grad.copy()))
                data._fresh_grad = False
        backward(*arguments)
        for data, grad, earlier in saved:
            if data._fresh_grad:
                grad += earlier
            data._fresh_grad = True

    def finish(self):
        """Gives devices that sat out the gradient zero of what the others have."""
        for replicas in self._replicas:
            fresh = [data._fresh_grad for data, _ in replicas]
            if any(fresh):
                for (data, grad), is_fresh in zip(replicas, fresh):
                    if not is_fresh:
                        grad[:] = 0
                        data._fresh_grad = True

    def restore(self):
        """Puts back the marks of what this backward call has not reached."""
        for data in self._former:
            data._fresh_grad = True


def _backward(*arguments):
    """In the place of the library's MXAutogradBackwardEx."""
    num_heads, heads, num_variables, retain_graph, train_mode = (
        getattr(arguments[k], "value", arguments[k]) for k in (0, 1, 3, 5, 7)
    )
    calls = [] if getattr(_inside, "a_device", False) else list(_calls)
    if not calls:
        return _original(*arguments)
    gates = [call.border for call in calls if isinstance(call.border, Gate)]
    for gate in gates:
        gate.is_closed = bool(num_variables)
    if num_variables:  # autograd.grad, which no leaf is told of
        return _original(*arguments)
    with autograd.pause():
        return _through(calls, arguments, (num_heads, heads), retain_graph, train_mode)


def _through(calls, arguments, heads, retain_graph, train_mode):
    """Backward through the caller's graph and all devices' graphs that it reaches."""
    gradients, reached = _Gradients(calls), []
    try:
        code = _original(*arguments)
        if code == 0:
            reached = [call for call in calls if call.reached()]
        if any(isinstance(call.border, Gate) for call in reached):
            # The gates are going to be waited for: if the heads have failed, in vain.
            code = _wait_to_read(*heads)
            if code != 0:
                raise mx.base.get_last_ffi_error()
        left = len(reached)
        for call in _in_order(reached):
            left -= 1
            # Running statistics, or a common output, join the graphs of several calls.
            gradients.add(call.go_on, bool(retain_graph) or left > 0, bool(train_mode))
        if reached:
            gradients.finish()
    except BaseException as error:
        for call in reached:
            call.break_off(error)
        raise
    finally:
        gradients.restore()
    if not retain_graph:
        for call in reached:
            call.release()
    return code


def _wait_to_read(count, handles):
    wait = mx.base._LIB.MXNDArrayWaitToRead
    codes = (wait(ctypes.c_void_p(handles[k])) for k in range(count))
    return next((code for code in codes if code != 0), 0)


def _in_order(calls):
    """Calls as their gradients come, so that none waits for those of a later one."""
    gates = {call.border: call for call in calls if isinstance(call.border, Gate)}
    while gates:
        yield gates.pop(await_any(gates))
    # A call may have fed later ones, never earlier ones.
    leaves = [call for call in calls if isinstance(call.border, Leaves)]
    yield from sorted(leaves, key=lambda call: call.number, reverse=True)


def _install():
    global _original
    if _original is None:
        _original = mx.base._LIB.MXAutogradBackwardEx
        mx.base._LIB.MXAutogradBackwardEx = _backward
