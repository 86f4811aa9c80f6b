"""Checks of users' arguments.

A check raises an error with the name of the argument. Some checks return the value.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any, Callable, TypeVar

import mxnet as mx
import numpy as np

from .compat import Context

_Function = TypeVar("_Function", bound=Callable)


# The arguments' names in MXNet, PyTorch and JAX, and what they are called here.
_OTHER_NAMES = {
    **dict.fromkeys(("num_features", "num_channels"), "in_channels"),
    **dict.fromkeys(("device", "devices", "context", "contexts", "ctxs"), "ctx"),
    **dict.fromkeys(("num_device", "ndev", "num_gpus", "ngpus"), "num_devices"),
    "eps": "epsilon",
    "process_group": "group",
    "syncbn": "sync_bn",
    "use_running_average": "use_global_stats",
    "affine": "center and scale",
    "use_bias": "center",
    "use_scale": "scale",
}


def check_keywords(function: _Function) -> _Function:
    """Make a function's error for an unknown keyword name the right one."""
    known = list(inspect.signature(function).parameters)
    accepted = {*known, "prefix", "params"}  # arguments of Block
    public = comma_list(name for name in known if name not in ("self", "kwargs"))

    @functools.wraps(function)
    def checked(*args, **kwargs):
        for name in kwargs.keys() - accepted:
            other = _OTHER_NAMES.get(name, "")
            is_known = other and set(other.split(" and ")) <= accepted
            hint = f"Write {other}." if is_known else f"The arguments are {public}."
            raise TypeError(f"unexpected keyword argument {name!r}. {hint}")
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def short_repr(value: object) -> str:
    """Return a value's repr in one line of at most 200 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else f"{text[:150]}...{text[-40:]}"


def pluralize(number: int, noun: str) -> str:
    """Return a count with its noun: "1 row", "2 rows"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def comma_list(values: Iterable) -> str:
    return ", ".join(map(str, values))


def check_type(name: str, value: Any, types: Any, expected: str) -> Any:
    """Raise TypeError unless isinstance(value, types), which `expected` describes."""
    if not isinstance(value, types):
        raise TypeError(f"{name} must be {expected}, got {short_repr(value)}")
    return value


def check_int(
    name: str, value: Any, minimum: int | None = None, maximum: int | None = None
) -> None:
    is_int = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_int:
        raise TypeError(f"{name} must be an int, got {short_repr(value)}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {short_repr(value)}")
    if maximum is not None and value > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {short_repr(value)}")


def check_bool(name: str, value: Any) -> bool:
    return bool(check_type(name, value, (bool, np.bool_), "True or False"))


def as_real(value: object) -> float:
    """Return a number as a float (infinite if too large), or NaN for another type."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return -math.inf if value < 0 else math.inf


def check_real(
    name: str, value: object, expected: str, holds: Callable[[float], bool]
) -> float:
    """Raise an error unless `holds(value)`, which `expected` describes."""
    number = as_real(value)
    if not holds(number):
        error = ValueError if isinstance(value, Real) else TypeError
        raise error(f"{name} must be {expected}, got {short_repr(value)}")
    return number


def check_block(name: str, value: Any) -> Any:
    return check_type(name, value, mx.gluon.Block, "a gluon.Block")


def check_choice(name: str, value: Any, choices: Sequence) -> None:
    """Raise ValueError unless `value` is one of `choices`: strings, perhaps None."""
    if not isinstance(value, (str, type(None))) or value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(
            f"{name} must be {comma_list(others)} or {last}, got {short_repr(value)}"
        )


def check_contexts(name: str, value: Any) -> list[mx.Context]:
    """Return a list from one context or a list of contexts, which must be distinct."""
    if isinstance(value, Context):
        value = [value]
    is_list = isinstance(value, (list, tuple))
    if not is_list or not all(isinstance(context, Context) for context in value):
        raise TypeError(
            f"{name} must be a list of mxnet.Context, such as [mx.cpu(0), mx.cpu(1)], "
            f"got {short_repr(value)}"
        )
    if not value:
        raise ValueError(f"{name} must have at least one context, got []")
    has_cuda = mx.runtime.Features().is_enabled("CUDA")
    for context in value:
        if value.count(context) > 1:
            raise ValueError(
                f"{name} must have distinct contexts, got {context} "
                f"{value.count(context)} times"
            )
        if context.device_type == "gpu" and not has_cuda:
            raise ValueError(
                f"{name} must have CPU contexts only, got {context}: this MXNet was "
                "built without CUDA. Pass [mx.cpu(0), mx.cpu(1)], or run `pip install "
                "mxnet-cu112==1.9.1`."
            )
    return list(value)
