"""Calls of mx.random.seed, which sets the seed of the calling thread only."""

from __future__ import annotations

from functools import lru_cache, wraps
from typing import Callable

import mxnet as mx
from mxnet import autograd

seed = mx.random.seed


@lru_cache(maxsize=None)
def watch(note: Callable[[], None]) -> None:
    """Call `note` after each later call of mx.random.seed."""

    @wraps(seed)
    def noted(*args, **kwargs):
        seed(*args, **kwargs)
        note()

    mx.random.seed = noted


def draw() -> int:
    """Return a seed from the calling thread's generator, which the draw advances."""
    with autograd.pause(), mx.util.np_array(False):
        value = mx.nd.random.randint(0, 2**31 - 1, (1,), ctx=mx.cpu(), dtype="int32")
    return int(value.asscalar())
