"""The destinations of gradients in a backward through parallel nets.

Called by ``backward.py``, which goes through the graphs. `Written` is for `backward`:
gradients are written to the variables' own arrays, as MXNet does it. `Returned` is for
`autograd.grad`: they are new arrays, and the variables' own stay as they are.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import mxnet as mx
from mxnet import autograd

from ..mxnet_private import graphs
from ..mxnet_private.parameters import data_of, gradients_of, is_fresh, mark_fresh
from .bridge import Gate


class Written:
    """The parameters' gradients in one backward call, which may reach one often.

    Each graph that reaches a parameter with ``grad_req='write'`` overwrites what
    another one (of another call of the net, or the caller's own) has written.

    A caller's graph with a gate may reach parameters of the nets, too (weight decay in
    the loss). MXNet merges the operator that writes such a gradient with operators that
    wait for the gate, and the gate waits for the devices. So devices that wrote to the
    same arrays would deadlock: they write to new ones, which are added afterwards.
    """

    def __init__(self, calls: list, names: set, request: graphs.Request) -> None:
        self._names, self._request = names, request
        # For each parameter of the nets that were called: its data and gradients on the
        # devices of these calls, and whether they are overwritten.
        self._replicas = {
            (id(p), *call.devices.contexts): [
                (data, grad, p.grad_req == "write")
                for data, grad in zip(data_of(p), gradients_of(p))
                if data.context in call.devices.contexts
            ]
            for call in calls
            for p in call.batch.parameters
        }
        self._are_shared = any(isinstance(call.bridge, Gate) for call in calls) and any(
            graphs.name_of(data) in names for data, *_ in self._all()
        )
        self._separate: list = []  # of devices: replicas with new gradients
        self._former = [data for data, *_ in self._all() if is_fresh(data)]
        for data in self._former:
            mark_fresh(data, False)

    def _all(self):
        replicas = itertools.chain.from_iterable(self._replicas.values())
        return {id(replica[0]): replica for replica in replicas}.values()

    def of_caller(self) -> None:
        """Differentiates the caller's graph."""
        self._request.run()

    def of_devices(self, call: Any, retain_graph: bool) -> None:
        """Differentiates the devices' graphs; adds to what earlier ones wrote."""
        saved = []
        for data, grad, is_written in self._all():
            if is_written and is_fresh(data) and not self._are_shared:
                saved.append((data, grad, grad.copy()))
                mark_fresh(data, False)
        variables = call.bridge.variables
        gradients = {n: variables[n].grad for n in variables.keys() & self._names}
        call.resume(gradients, partial(self._differentiate, retain_graph))
        for data, grad, earlier in saved:
            if is_fresh(data):
                grad += earlier
            mark_fresh(data)
        for (data, grad, is_written), new in self._separate:
            grad[:] = new if is_written and not is_fresh(data) else grad + new
            mark_fresh(data)
        self._separate.clear()

    def _differentiate(self, retain_graph, heads, gradients, shards):
        flags = retain_graph, self._request.train_mode
        if not self._are_shared:
            graphs.differentiate(heads, gradients, (), *flags)
            return [shard.grad for shard in shards]
        behind = graphs.names_behind(heads)
        own = [r for r in self._all() if graphs.name_of(r[0]) in behind]
        variables = [*(data for data, *_ in own), *shards]
        results = graphs.differentiate(heads, gradients, variables, *flags)
        self._separate.extend(zip(own, results))
        return results[len(own) :]

    def finish(self) -> None:
        """Sets gradients to zero on skipped devices, where the others have one."""
        for replicas in self._replicas.values():
            if any(is_fresh(data) for data, *_ in replicas):
                for replica in replicas:
                    if not is_fresh(replica[0]):
                        contribute_nothing(*replica)

    def restore(self) -> None:
        """Restores the marks of what this backward call has not reached."""
        for data in self._former:
            mark_fresh(data)


def contribute_nothing(
    data: mx.nd.NDArray, grad: mx.nd.NDArray, is_written: bool
) -> None:
    """Makes a gradient that no backward will write ready for a Trainer.

    `is_written` is False for gradients that are added up, which stay as they are.
    """
    if is_written:
        with autograd.pause():
            grad[:] = 0
    mark_fresh(data)


class Returned:
    """The gradients that `autograd.grad` returns: of any variables in all the graphs.

    Where one replica of a parameter is asked for, all devices differentiate with
    respect to theirs, because their layers exchange gradients.
    """

    def __init__(self, calls: list, names: set, request: graphs.Request) -> None:
        if request.create_graph:
            raise ValueError(
                "autograd.grad got create_graph=True, but the gradients of a parallel "
                "net cannot be differentiated again; expected create_graph=False"
            )
        self._request = request
        variables = request.variables
        self._wanted = [graphs.name_of(variable) for variable in variables]
        self._gradients = {}  # by name
        asked = dict(zip(self._wanted, variables))
        self._in_caller = {n: v for n, v in asked.items() if n in names}
        for call in calls:
            for name in call.bridge.variables.keys() & names:
                self._in_caller[name] = call.bridge.variables[name]
        heads = [head for call in calls for row in call.heads for head in row]
        behind = names | graphs.names_behind(heads)
        self._in_devices: dict = {n: v for n, v in asked.items() if n in behind}
        parameters = dict.fromkeys(p for call in calls for p in call.batch.parameters)
        for p in filter(gradients_of, parameters):
            replicas = {graphs.name_of(data): data for data in data_of(p)}
            if replicas.keys() & asked.keys() and replicas.keys() & behind:
                self._in_devices.update(replicas)
        for number, name in enumerate(self._wanted):
            if name not in self._in_devices:
                raise ValueError(
                    f"variable {number} of autograd.grad is none that the heads depend "
                    "on, expected one that has a gradient and was used to compute them"
                )

    def of_caller(self) -> None:
        """Differentiates the caller's graph."""
        gradients = self._request.run_for(list(self._in_caller.values()))
        self._gradients.update(zip(self._in_caller, gradients))

    def of_devices(self, call: Any, retain_graph: bool) -> None:
        """Differentiates the devices' graphs; adds to earlier gradients."""
        call.resume(self._gradients, partial(self._differentiate, retain_graph))

    def _differentiate(self, retain_graph, heads, gradients, shards):
        behind = graphs.names_behind(heads)
        own = {n: v for n, v in self._in_devices.items() if n in behind}
        variables = [*own.values(), *shards]
        if not variables:
            return []
        flags = retain_graph, self._request.train_mode
        results = graphs.differentiate(heads, gradients, variables, *flags)
        for name, result in zip(own, results):
            earlier = self._gradients.get(name)
            self._gradients[name] = result if earlier is None else earlier + result
        return results[len(own) :]

    def finish(self) -> None:
        """Hands the gradients to `autograd.grad`."""
        results = []
        for number, name in enumerate(self._wanted):
            result = self._gradients.get(name)
            if result is None:  # this replica has had no row
                result = mx.nd.zeros_like(self._in_devices[name])
            results.append(result.copy() if name in self._wanted[:number] else result)
        self._request.answer(results)

    def restore(self) -> None:
        """Does nothing: no mark was changed."""
