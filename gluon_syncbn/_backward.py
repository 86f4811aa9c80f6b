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
    recorded = [c for c in columns if autograd.is_recording() and is_recorded(c[0])]
    if recorded:
        wholes = iter(_Call(sharded.batch, net).attach(recorded))
        leaves = [
            next(wholes) if any(c is r for r in recorded) else join(c, axis, context)
            for c in columns
        ]
    else:
        leaves = [join(column, axis, context) for column in columns]
    return rebuild(sharded[0], iter(leaves))


class _Call:
    """One recorded call of a parallel net, alive as long as the caller's graph is."""

    def __init__(self, batch, net):
        self.net = net
        self.thread = threading.get_ident()
        self.number = next(_numbers)
        kind = Gate if batch.differentiable else Leaves
        self.border = kind(net.devices.contexts[0], net.batch_axis)
        self._batch = batch
        self._heads = []  # per device its outputs
        self._shards = [shards for _, shards in batch.differentiable]

    def attach(self, columns):
        """The outputs, given as columns of parts, as whole arrays of the caller."""
        self._heads = list(zip(*columns))
        _calls.add(self)
        _install()
        inputs = [x for x, _ in self._batch.differentiable]
        self._batch = None
        return self.border.attach(self, columns, inputs)

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
                autograd.backward(heads, gradients, retain_graph, train_mode)

        idle = [[]] * (len(devices) - len(self._heads))
        gradients = [*self.border.take(), *idle]
        devices.map(backward, [*self._heads, *idle], gradients, devices.contexts)
        if self._shards:
            inputs = [[s.grad for s in shards] for shards in self._shards]
            ranks = range(len(devices))
            devices.map(lambda k: k or self.border.give(inputs), ranks)
        if not retain_graph:
            self._release()

    def break_off(self, error):
        """Lets nobody wait for gradients that will not come."""
        self.border.break_off(error)
        self._release()

    def _release(self):
        self._heads = self._shards = []
        _calls.discard(self)


class _Gradients:
    """The parameters' gradients in one backward call, which may reach one often.

    Each graph that reaches a parameter with ``grad_req='write'`` overwrites what
    another one (of another call of the net, or the caller's own) has written.
    """

    def __init__(self, nets):
        self._arrays = {}  # by id of the data: data, gradient
        for net in nets:
            for parameter in net.collect_params().values():
                if parameter.grad_req == "write" and parameter._grad is not None:
                    for data, grad in zip(parameter.list_data(), parameter.list_grad()):
                        self._arrays[id(data)] = data, grad
        self._former = {k for k, (data, _) in self._arrays.items() if data._fresh_grad}
        for key in self._former:
            self._arrays[key][0]._fresh_grad = False

    def add(self, backward, *arguments):
        """Calls `backward`, and adds up what it and earlier ones have written."""
        saved = []
        for data, grad in self._arrays.values():
            if data._fresh_grad:
                saved.append((data, grad, grad.copy()))
                data._fresh_grad = False
        backward(*arguments)
        for data, grad, earlier in saved:
            if data._fresh_grad:
                grad += earlier
            data._fresh_grad = True

    def finish(self, net):
        """Gives devices that sat out the gradient zero of what the others have."""
        for parameter in net.collect_params().values():
            if parameter.grad_req != "write" or parameter._grad is None:
                continue
            replicas = list(zip(parameter.list_data(), parameter.list_grad()))
            if any(data._fresh_grad for data, _ in replicas):
                for data, grad in replicas:
                    if not data._fresh_grad:
                        grad[:] = 0
                        data._fresh_grad = True

    def restore(self):
        """Puts back the marks of what this backward call has not reached."""
        for key in self._former:
            self._arrays[key][0]._fresh_grad = True


def _backward(*arguments):
    """In the place of the library's MXAutogradBackwardEx."""
    num_variables, retain_graph, train_mode = (
        getattr(arguments[k], "value", arguments[k]) for k in (3, 5, 7)
    )
    thread = threading.get_ident()
    calls = [call for call in _calls if call.thread == thread]
    if not calls or num_variables:
        return _original(*arguments)
    reached = []
    with autograd.pause():
        gradients = _Gradients({call.net for call in calls})
        try:
            code = _original(*arguments)
            if code == 0:
                reached = [call for call in calls if call.reached()]
            for call in _in_order(reached):
                gradients.add(call.go_on, bool(retain_graph), bool(train_mode))
            for net in {call.net for call in reached}:
                gradients.finish(net)
        except BaseException as error:
            for call in reached:
                call.break_off(error)
            raise
        finally:
            gradients.restore()
    return code


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
