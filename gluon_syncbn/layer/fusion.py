"""Folds activation blocks into the batch normalizations in front of them.

It must not know what a layer does with its activation. Gluon does not store which block
reads which block's output, so the net is traced as a whole, or in parts where a
Sequential cannot be; blocks that cannot be traced are unchanged.
"""

from __future__ import annotations

import collections
import json
from typing import Any, Callable

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import HybridBlock, nn

from ..common.mxnet_version import IS_GLUON_2
from ..mxnet_private.blocks import blocks_of, children_of, name_of, only_hook
from ..native.program import warn
from . import activations


class Folded(HybridBlock):
    """An activation block whose work the layer in front of it does."""

    def forward(self, x: Any, *args: Any) -> Any:
        return x

    def __repr__(self):
        name, slope = self._folded
        return f"Folded({name}{'' if slope is None else f', {slope}'})"


def fold(layer: Any, block: mx.gluon.Block) -> None:
    """Gives a layer the activation of the block that follows it."""
    block._folded_from, block._folded = type(block), activations.of_block(block)
    block.__class__ = Folded
    layer._sync.activation, layer._sync.from_block = block._folded, block


def unfold(layer: Any) -> None:
    """Undoes `fold`: the block after the layer does its work again."""
    block = layer._sync.from_block
    if block is not None:
        block.__class__ = block._folded_from
        del block._folded_from, block._folded
        layer._sync.activation, layer._sync.from_block = activations.NONE, None


def check_can_unfold(net: mx.gluon.Block) -> None:
    """Raises ValueError if a layer in the net has its activation from outside of it."""
    inside = blocks_of(net)
    for layer in inside:
        block = getattr(getattr(layer, "_sync", None), "from_block", None)
        if block is not None and block not in inside:
            raise ValueError(
                f"{layer.name} was fused with {name_of(block)}, which is not part of "
                f"{name_of(net)}: revert a net that holds both"
            )


def find_pairs(
    net: mx.gluon.Block, is_layer: Callable[[Any], bool]
) -> list[tuple[mx.gluon.Block, mx.gluon.Block]]:
    """The layers of a net whose output only an activation block reads, and that block.

    `is_layer` tells whether a block is a layer that may get an activation. Both blocks
    of a pair are used once, because names of nodes do not tell several uses apart.
    """
    traces, loose = [], set()
    if IS_GLUON_2:
        uses = list(_uses_in_containers(net, is_layer))
    else:
        _trace_parts(net, traces, loose)
        uses = [use for calls, graph in traces for use in _uses(calls, graph, is_layer)]
        uses = list(dict.fromkeys(uses))
    found = collections.Counter(member for use in uses for member in use)
    once = {member for member, count in found.items() if count == 1}
    once -= {None, *loose}
    return [use for use in uses if once.issuperset(use)]


def _trace_parts(block, traces, loose):
    """Traces the largest possible parts; `loose` are blocks outside of any part."""
    error = "it is no HybridBlock"
    if isinstance(block, HybridBlock):
        try:
            traces += [_trace(block, training) for training in (True, False)]
            return
        except Exception as caught:  # whatever a forward method does with a symbol
            error = f"{type(caught).__name__}: {caught}".splitlines()[0]
    if _calls_children(type(block)):
        for child in children_of(block).values():
            loose.add(child)
            _trace_parts(child, traces, loose)
    else:
        _warn_of(block, error)


def _warn_of(block, error):
    if children_of(block):
        warn(
            f"{name_of(block)} keeps its activation blocks, because it cannot be "
            f"traced ({error}); convert such parts of it that are called as a whole"
        )


def _calls_children(cls):
    """Tells whether a class has the forward of a container, which calls children."""
    if issubclass(cls, nn.HybridSequential):
        name = "forward" if IS_GLUON_2 else "hybrid_forward"
        return getattr(cls, name) is getattr(nn.HybridSequential, name)
    return issubclass(cls, nn.Sequential) and cls.forward is nn.Sequential.forward


def _uses_in_containers(block, is_layer):
    """As `_uses`, for Gluon 2, where nothing is traced without arrays: neighbours."""
    if not _calls_children(type(block)):
        _warn_of(block, "MXNet 2 traces no net without arrays")
        for inner in blocks_of(block):
            yield inner, None
        return
    children = list(children_of(block).values())
    for before, child, after in zip([None, *children], children, [*children[1:], None]):
        if is_layer(child) and activations.of_block(after) is not None:
            yield child, after
        elif not is_layer(before) or activations.of_block(child) is None:
            yield from _uses_in_containers(child, is_layer)


def _trace(net, training):
    """(calls, graph): (block, input, output) of every call, and the graph as JSON."""
    calls = []

    def remember(block, inputs, output):
        if len(inputs) == 1 and all(
            isinstance(value, mx.sym.Symbol) for value in (*inputs, output)
        ):
            calls.append((block, inputs[0].name, output.name))

    data = mx.sym.var("data")
    if mx.util.is_np_array():
        data = data.as_np_ndarray()
    # The user's own hooks expect arrays.
    with only_hook(net, remember), autograd.pause(train_mode=training):
        outputs = net(data)
    if isinstance(outputs, (list, tuple)):
        outputs = mx.sym.Group(list(outputs))
    return calls, json.loads(outputs.tojson())


def _uses(calls, graph, is_layer):
    """(layer, activation block) of every call of either; None for a missing partner."""
    names = [node["name"] for node in graph["nodes"]]
    readers = {name: [] for name in names}
    for node in graph["nodes"]:
        for source, *_ in node["inputs"]:
            readers[names[source]].append(node["name"])
    for source, *_ in graph["heads"]:
        readers[names[source]].append(None)  # the caller

    layers = {out: block for block, _, out in calls if is_layer(block)}
    blocks = {
        out: (block, source)
        for block, source, out in calls
        if activations.of_block(block) is not None
    }
    for out, layer in layers.items():
        read_by = readers.get(out, [])
        alone = len(read_by) == 1 and read_by[0] in blocks and names.count(out) == 1
        yield layer, blocks[read_by[0]][0] if alone else None
    for out, (block, source) in blocks.items():
        if source not in layers or names.count(out) > 1:
            yield None, block
