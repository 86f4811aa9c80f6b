"""Checks of users' arguments: one sentence with the value given and the one expected.

Each check returns the value; it must not know what for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import mxnet as mx
import numpy as np

from .mxnet_version import Context


def short_repr(value: object) -> str:
    """A value as a sentence shows it: in one line, and shortened."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else f"{text[:150]}...{text[-40:]}"


def pluralize(number: int, noun: str) -> str:
    """A number of things: "1 row", "2 rows"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def comma_list(values: Iterable) -> str:
    """Values in words: "cpu(0), cpu(1)"."""
    return ", ".join(map(str, values))


def check_type(name: str, value: Any, types: type | tuple, expected: str) -> Any:
    """TypeError unless an instance; `expected` says in words of what."""
    if not isinstance(value, types):
        raise TypeError(f"{name} is {expected}, but got {short_repr(value)}")
    return value


def is_int(value: object) -> bool:
    """Tells whether a value is an int; bools are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_int(
    name: str, value: Any, minimum: int | None = None, maximum: int | None = None
) -> int:
    """TypeError unless an int; ValueError outside of the bounds."""
    if not is_int(value):
        raise TypeError(f"{name} is an int, but got {short_repr(value)}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} is at least {minimum}, but got {short_repr(value)}")
    if maximum is not None and value > maximum:
        raise ValueError(f"{name} is at most {maximum}, but got {short_repr(value)}")
    return value


def check_bool(name: str, value: Any) -> bool:
    """TypeError unless True or False."""
    return bool(check_type(name, value, (bool, np.bool_), "True or False"))


def as_real(value: object) -> float:
    """A number as a float, infinite beyond all floats; NaN for what is no number."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return -math.inf if value < 0 else math.inf


def check_real(
    name: str, value: object, expected: str, holds: Callable[[float], bool]
) -> float:
    """A float for which `holds` is true; `expected` says in words which these are."""
    number = as_real(value)
    if not holds(number):
        error = ValueError if isinstance(value, Real) else TypeError
        raise error(f"{name} is {expected}, but got {short_repr(value)}")
    return number


def check_block(name: str, value: Any) -> Any:
    """TypeError unless a Block."""
    return check_type(name, value, mx.gluon.Block, "a gluon.Block")


def check_callable(name: str, value: Any) -> Callable:
    """TypeError unless it can be called."""
    if not callable(value):
        raise TypeError(f"{name} is a function, but got {short_repr(value)}")
    return value


def check_choice(name: str, value: Any, choices: Sequence) -> Any:
    """ValueError unless one of some texts, or None where that is one of them."""
    if not isinstance(value, (str, type(None))) or value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(
            f"{name} is {comma_list(others)} or {last}, but got {short_repr(value)}"
        )
    return value


def check_text(name: str, value: Any) -> str:
    """TypeError unless a str; ValueError if it cannot be handed to native code."""
    check_type(name, value, str, "a str")
    if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError(
            f"{name} is a str without NUL and lone surrogates, but got "
            f"{short_repr(value)}"
        )
    return value


def check_contexts(name: str, value: Any) -> list[mx.Context]:
    """A list of distinct contexts, at least one."""
    if isinstance(value, Context):
        value = [value]
    check_type(name, value, (list, tuple), "a list of mxnet.Context")
    for context in value:
        if not isinstance(context, Context):
            raise TypeError(
                f"{name} is a list of mxnet.Context, but it holds {short_repr(context)}"
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
