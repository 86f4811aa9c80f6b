"""The destinations of gradients in a backward through parallel nets.

Called by ``backward.py``, which goes through the graphs. `Written` is for `backward`:
gradients are written to the variables' own arrays, as MXNet does it. `Returned` is for
`autograd.grad`: they are new arrays, and the variables' own stay as they are.
"""

from __future__ import annotations

import ctypes
import itertools
from functools import partial
from typing import Any, Callable

import mxnet as mx
from mxnet import autograd
from mxnet.ndarray import _ndarray_cls

from . import graph

# The arguments of MXAutogradBackwardEx.
_VARIABLES, _RETAIN_GRAPH, _CREATE_GRAPH, _TRAIN_MODE = 4, 5, 6, 7


class Written:
    """The parameters' gradients in one backward call, which may reach one often.

    Each graph that reaches a parameter with ``grad_req='write'`` overwrites what
    another one (of another call of the net, or the caller's own) has written.
    """

    def __init__(self, calls: list, names: set, arguments: tuple) -> None:
        self._names, self._arguments = names, arguments
        self._train_mode = bool(arguments[_TRAIN_MODE].value)
        # For each parameter of the nets that were called: its data and gradients on the
        # devices of these calls, and whether they are overwritten.
        self._replicas = {
            (id(p), *call.contexts): [
                (data, grad, p.grad_req == "write")
                for data, grad, context in zip(p._data, p._grad, p.list_ctx())
                if context in call.contexts
            ]
            for call in calls
            for p in call.parameters
            if p._grad is not None
        }
        self._former = []
        for data, *_ in self._all():
            if data._fresh_grad:
                self._former.append(data)
                data._fresh_grad = False

    def _all(self):
        replicas = itertools.chain.from_iterable(self._replicas.values())
        return {id(replica[0]): replica for replica in replicas}.values()

    def of_caller(self, original: Callable) -> int:
        """Differentiates the caller's graph."""
        return original(*self._arguments)

    def of_devices(self, call: Any, retain_graph: bool) -> None:
        """Differentiates the devices' graphs; adds to what earlier ones wrote."""
        saved = []
        for data, grad, is_written in self._all():
            if is_written and data._fresh_grad:
                saved.append((data, grad, grad.copy()))
                data._fresh_grad = False
        variables = call.bridge.variables
        gradients = {n: variables[n].grad for n in variables.keys() & self._names}
        call.resume(gradients, partial(self._differentiate, retain_graph))
        for data, grad, earlier in saved:
            if data._fresh_grad:
                grad += earlier
            data._fresh_grad = True

    def _differentiate(self, retain_graph, heads, gradients, shards):
        autograd.backward(heads, gradients, retain_graph, self._train_mode)
        return [shard.grad for shard in shards]

    def finish(self) -> None:
        """Sets gradients to zero on devices that sat out, where the others have one."""
        for replicas in self._replicas.values():
            fresh = [data._fresh_grad for data, *_ in replicas]
            if any(fresh):
                for (data, grad, is_written), is_fresh in zip(replicas, fresh):
                    if not is_fresh:
                        if is_written:
                            grad[:] = 0
                        data._fresh_grad = True

    def restore(self) -> None:
        """Restores the marks of what this backward call has not reached."""
        for data in self._former:
            data._fresh_grad = True


class Returned:
    """The gradients that `autograd.grad` returns: of any variables in all the graphs.

    Where one replica of a parameter is asked for, all devices differentiate with
    respect to theirs, because their layers exchange gradients.
    """

    def __init__(self, calls: list, names: set, arguments: tuple) -> None:
        if arguments[_CREATE_GRAPH].value:
            raise ValueError(
                "autograd.grad got create_graph=True, but the gradients of a parallel "
                "net cannot be differentiated again; expected create_graph=False"
            )
        self._arguments = arguments
        self._train_mode = bool(arguments[_TRAIN_MODE].value)
        variables = list(map(array_of, arguments[_VARIABLES]))
        self._wanted = [graph.name_of(variable.handle) for variable in variables]
        self._gradients = {}  # by name
        asked = dict(zip(self._wanted, variables))
        self._in_caller = {n: v for n, v in asked.items() if n in names}
        for call in calls:
            for name in call.bridge.variables.keys() & names:
                self._in_caller[name] = call.bridge.variables[name]
        heads = [head.handle for call in calls for row in call.heads for head in row]
        behind = names | graph.names_behind(heads)
        self._in_devices: dict = {n: v for n, v in asked.items() if n in behind}
        parameters = dict.fromkeys(p for call in calls for p in call.parameters)
        for p in [p for p in parameters if p._grad is not None]:
            replicas = {graph.name_of(data.handle): data for data in p._data}
            if replicas.keys() & asked.keys() and replicas.keys() & behind:
                self._in_devices.update(replicas)
        for number, name in enumerate(self._wanted):
            if name not in self._in_devices:
                raise ValueError(
                    f"variable {number} of autograd.grad is none that the heads depend "
                    "on, expected one that has a gradient and was used to compute them"
                )

    def of_caller(self, original: Callable) -> int:
        """Differentiates the caller's graph."""
        grads = ctypes.POINTER(ctypes.c_void_p)()
        stypes = ctypes.POINTER(ctypes.c_int)()
        arguments = list(self._arguments)
        handles = mx.base.c_handle_array(self._in_caller.values())
        arguments[3:5] = len(self._in_caller), handles
        arguments[8:] = ctypes.byref(grads), ctypes.byref(stypes)
        code = original(*arguments)
        if code == 0:
            for number, name in enumerate(self._in_caller):
                handle = ctypes.c_void_p(grads[number])
                self._gradients[name] = _ndarray_cls(handle, stype=stypes[number])
        return code

    def of_devices(self, call: Any, retain_graph: bool) -> None:
        """Differentiates the devices' graphs, and adds to what is there."""
        call.resume(self._gradients, partial(self._differentiate, retain_graph))

    def _differentiate(self, retain_graph, heads, gradients, shards):
        behind = graph.names_behind([head.handle for head in heads])
        there = {n: v for n, v in self._in_devices.items() if n in behind}
        variables = [*there.values(), *shards]
        if not variables:
            return []
        results = autograd.grad(
            heads, variables, gradients, retain_graph, False, self._train_mode
        )
        for name, result in zip(there, results):
            earlier = self._gradients.get(name)
            self._gradients[name] = result if earlier is None else earlier + result
        return results[len(there) :]

    def finish(self) -> None:
        """Hands the gradients to `autograd.grad`, as arrays of handles."""
        results = []
        for number, name in enumerate(self._wanted):
            result = self._gradients.get(name)
            if result is None:  # this replica has had no row
                result = mx.nd.zeros_like(self._in_devices[name])
            results.append(result.copy() if name in self._wanted[:number] else result)
        handles = (ctypes.c_void_p * len(results))(*(r.handle for r in results))
        ids = mx.nd.ndarray._STORAGE_TYPE_STR_TO_ID
        stypes = (ctypes.c_int * len(results))(*(ids[r.stype] for r in results))
        for result in results:
            result.handle = None  # it is autograd.grad's now
        to_handles, to_stypes = (argument._obj for argument in self._arguments[8:])
        to_handles.contents = ctypes.c_void_p.from_buffer(handles)
        to_stypes.contents = ctypes.c_int.from_buffer(stypes)

    def restore(self) -> None:
        """Does nothing: no mark was changed."""


def array_of(handle: Any) -> mx.nd.NDArray:
    """A new NDArray for the array that a handle stands for."""
    copy = ctypes.c_void_p()
    mx.base.check_call(
        mx.base._LIB.MXShallowCopyNDArray(ctypes.c_void_p(handle), ctypes.byref(copy))
    )
    return mx.nd.NDArray(copy)
