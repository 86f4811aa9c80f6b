"""The destinations of gradients in a backward through parallel nets.

Called by ``backward.py``, which goes through the graphs. `Written` is for `backward`,
which writes to the variables' own arrays, and `Returned` for `autograd.grad`, which
leaves these as they are. It must not know in which order graphs are reached.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from typing import Sequence

import mxnet as mx
from mxnet import autograd

from ..layer.batch_norm import contexts_of
from ..mxnet_private import graphs
from ..mxnet_private.parameters import data_of, gradients_of, is_fresh, mark_fresh


class Written:
    """The parameters' gradients in one backward call, which may reach one often.

    Each graph that reaches a parameter with ``grad_req='write'`` overwrites what
    another one (of another call of the net, or the caller's own) has written.
    """

    def __init__(self, calls: list, names: set, request: graphs.Request) -> None:
        self._request = request
        # For each parameter of the nets that were called: its data and gradients on the
        # devices of these calls, by context, and whether gradients are overwritten.
        self._replicas = {
            (id(p), *call.devices.contexts): [
                (context, data, grad, p.grad_req == "write")
                for context, data, grad in zip(
                    contexts_of(p), data_of(p), gradients_of(p)
                )
                if context in call.devices.contexts
            ]
            for call in calls
            for p in call.batch.parameters
        }
        self._former = [data for _, data, *_ in self._all() if is_fresh(data)]
        for data in self._former:
            mark_fresh(data, False)

    def _all(self):
        replicas = itertools.chain.from_iterable(self._replicas.values())
        return {id(replica[1]): replica for replica in replicas}.values()

    @contextmanager
    def _adding(self, context):
        """In the block gradients are added to what earlier graphs wrote."""
        saved = []
        for on, data, grad, is_written in self._all():
            if is_written and context in (None, on) and is_fresh(data):
                saved.append((data, grad, grad.copy()))
                mark_fresh(data, False)
        yield
        for data, grad, earlier in saved:
            if is_fresh(data):
                grad += earlier
            mark_fresh(data)

    def differentiate(
        self,
        retain_graph: bool,
        context: mx.Context | None,
        heads: Sequence,
        gradients: Sequence,
        others: Sequence,
    ) -> list:
        """Differentiates one graph: a device's, or without `context` the caller's.

        Returns the gradients of other variables than parameters, as they are written.
        """
        for variable in others:
            mark_fresh(variable, False)
        flags = retain_graph, self._request.train_mode
        with self._adding(context):
            graphs.differentiate(heads, gradients, (), *flags)
        for variable in others:
            if not is_fresh(variable):  # these heads do not depend on it
                contribute_nothing(variable, variable.grad, True)
        return [variable.grad for variable in others]

    def finish(self) -> None:
        """Sets gradients to zero on skipped devices, where the others have one."""
        for replicas in self._replicas.values():
            if any(is_fresh(data) for _, data, *_ in replicas):
                for _, data, grad, is_written in replicas:
                    if not is_fresh(data):
                        contribute_nothing(data, grad, is_written)

    def restore(self) -> None:
        """Restores the marks of what this call, which may have failed, left alone."""
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
        self._request, self._gradients = request, {}  # by name
        variables = request.variables
        self._wanted = [graphs.name_of(variable) for variable in variables]
        asked = dict(zip(self._wanted, variables))
        heads = [head for call in calls for row in call.heads for head in row]
        names = names | graphs.names_behind(heads)
        self._variables = {n: v for n, v in asked.items() if n in names}
        parameters = dict.fromkeys(p for call in calls for p in call.batch.parameters)
        for p in filter(gradients_of, parameters):
            replicas = {graphs.name_of(data): data for data in data_of(p)}
            if replicas.keys() & asked.keys() and replicas.keys() & names:
                self._variables.update(replicas)
        for number, name in enumerate(self._wanted):
            if name not in self._variables:
                raise ValueError(
                    f"variable {number} of autograd.grad is none that the heads depend "
                    "on, expected one that has a gradient and was used to compute them"
                )

    def differentiate(
        self,
        retain_graph: bool,
        context: mx.Context | None,
        heads: Sequence,
        gradients: Sequence,
        others: Sequence,
    ) -> list:
        """As that of `Written`; adds up what was asked for."""
        names = graphs.names_behind(heads)
        own = {n: v for n, v in self._variables.items() if n in names}
        variables = [*own.values(), *others]
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
                result = mx.nd.zeros_like(self._variables[name])
            results.append(result.copy() if name in self._wanted[:number] else result)
        self._request.answer(results)

    def restore(self) -> None:
        """Does nothing: no mark was changed."""
