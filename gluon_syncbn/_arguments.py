"""Checks of users' arguments: one sentence with the value given and the one expected.

Called by all public functions. Each check returns the value.
"""

from numbers import Integral, Real

import mxnet as mx
import numpy as np


def is_int(value):
    """Whether a value is an int; bools are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_int(name, value, least=None, most=None):
    """TypeError unless an int; ValueError outside of the bounds."""
    if not is_int(value):
        raise TypeError(f"{name} is an int, but got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name} is at least {least}, but got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} is at most {most}, but got {value}")
    return value


def check_bool(name, value):
    """TypeError unless True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is True or False, but got {value!r}")
    return bool(value)


def check_real(name, value, expected):
    """TypeError unless a number; `expected` says in words which."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} is {expected}, but got {value!r}")
    return value


def check_block(name, value):
    """TypeError unless a Block."""
    if not isinstance(value, mx.gluon.Block):
        raise TypeError(f"{name} is a gluon.Block, but got {value!r}")
    return value


def check_callable(name, value):
    """TypeError unless it can be called."""
    if not callable(value):
        raise TypeError(f"{name} is a function, but got {value!r}")
    return value


def check_text(name, value):
    """TypeError unless a str."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is a str, but got {value!r}")
    return value


def check_contexts(name, value):
    """A list of distinct contexts, at least one."""
    if isinstance(value, mx.Context):
        value = [value]
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name} is a list of mxnet.Context, but got {value!r}")
    for context in value:
        if not isinstance(context, mx.Context):
            raise TypeError(
                f"{name} is a list of mxnet.Context, but it holds {context!r}"
            )
    if not value:
        raise ValueError(f"{name} is empty, expected at least one context")
    for context in value:
        if value.count(context) > 1:
            raise ValueError(
                f"{name} names {context} {value.count(context)} times, expected "
                "distinct contexts"
            )
    return list(value)
