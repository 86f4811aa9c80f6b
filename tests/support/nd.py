"""The operators of `mx.nd`, which in Gluon 2 take and return arrays of `mx.np`."""

import sys
from functools import wraps

from gluon_syncbn.compat import IS_GLUON_2
from gluon_syncbn.nested import flatten, rebuild

import mxnet as mx


def _with_np_arrays(function):
    @wraps(function)
    def call(*args, **kwargs):
        args, kwargs = _map("as_nd_ndarray", [args, kwargs])
        return _map("as_np_ndarray", function(*args, **kwargs))

    return call


def _map(method, values):
    leaves = [
        getattr(leaf, method)() if isinstance(leaf, mx.nd.NDArray) else leaf
        for leaf in flatten(values)
    ]
    return rebuild(values, iter(leaves))


class _Operators:
    def __init__(self, module):
        self._module = module

    def __getattr__(self, name):
        found = getattr(self._module, name)
        if isinstance(found, type(sys)):
            return _Operators(found)
        return found if isinstance(found, type) else _with_np_arrays(found)


nd = _Operators(mx.nd) if IS_GLUON_2 else mx.nd
