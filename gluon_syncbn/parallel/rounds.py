"""Detects that a plain loop over contexts was interrupted between two of them.

Called by ``plain_loop.py`` and ``participation.py``. It must not know what a net
computes. Such an interruption leaves one call waiting for the other contexts; the loop,
started again, calls the net for the first context in another ``autograd.record()``.
"""

from __future__ import annotations

import collections
import weakref
from typing import Sequence

import mxnet as mx

from ..mxnet_private.graphs import block_number
from ..native import failures

_rounds = weakref.WeakKeyDictionary()  # by net


class _Round:
    """The calls of a net since each context was last called equally often.

    Within one block of `autograd.record` a context may be called several times.
    """

    def __init__(self):
        self.calls = collections.Counter()
        self.blocks = {}  # by context that of its latest call
        self.recoveries = failures.latest_recovery[0]


def note_call(
    net: mx.gluon.Block, context: mx.Context, contexts: Sequence[mx.Context]
) -> None:
    """To be called before each call in training; ends an interrupted round."""
    this = _rounds.get(net)
    block = block_number()
    if this is None or this.recoveries != failures.latest_recovery[0]:
        this = _Round()
    elif this.blocks.get(context, block) != block:
        failures.recover(
            f"the net was called for {context} again, before it was called for all "
            "other contexts"
        )
        this = _Round()
    this.calls[context] += 1
    this.blocks[context] = block
    if len({this.calls[c] for c in contexts}) == 1:
        this = _Round()
    _rounds[net] = this


def forget() -> None:
    """To be called while nothing is in flight: then no round is incomplete."""
    _rounds.clear()
