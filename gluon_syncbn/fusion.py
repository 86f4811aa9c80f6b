"""Folds activation blocks into the batch normalizations in front of them.

Called by ``convert.py``. It must not know what a layer does with its activation.

Which block reads which block's output is not written down anywhere in Gluon, so the net
is traced: forward hooks tell which node belongs to which block, and the graph tells who
else reads it. A net that cannot be traced as a whole (several inputs, control flow) is
taken apart, and its children are traced.
"""

import json

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import HybridBlock

from . import activations


class Folded(HybridBlock):
    """What an activation block is while a layer in front of it has taken it in."""

    def forward(self, x, *args):
        return x

    def __repr__(self):
        return f"Folded({self._folded_from.__name__})"


class Fold:
    """The blocks that one conversion has folded, so that all can be unfolded again.

    All at once: an activation block may stand behind several layers.
    """

    def __init__(self):
        self._layers, self._blocks = [], []

    def add(self, layer, block):
        """Gives the activation of `block` to `layer`."""
        if not isinstance(block, Folded):
            block._folded_from, block._folded = type(block), activations.of_block(block)
            block.__class__ = Folded
            self._blocks.append(block)
        layer.set_activation(*block._folded, fold=self)
        self._layers.append(layer)

    def undo(self):
        """Gives the blocks their activations back."""
        for block in self._blocks:
            block.__class__ = block._folded_from
            del block._folded_from, block._folded
        for layer in self._layers:
            layer.set_activation(None)


def find_pairs(net, is_layer):
    """The layers of a net whose output only an activation block reads.

    Parameters
    ----------
    net : mxnet.gluon.Block
    is_layer : callable
        Tells whether a block is a layer that may get an activation.

    Returns
    -------
    list of (Block, Block)
        A layer, and the activation block behind it. A layer has the same activation in
        each of its uses, and a block nothing but such layers in front of it.
    """
    traces, loose = [], set()
    _trace_parts(net, traces, loose)
    uses = [use for trace in traces for use in _uses(*trace, is_layer)]
    pairs = {(a, b) for a, b in uses if a is not None and b is not None}
    # A use without its partner spoils both blocks in all their uses.
    spoilt = loose.union(*({a, b} for a, b in uses if a is None or b is None))
    while True:
        kinds = {}
        for layer, block in pairs:
            kinds.setdefault(layer, set()).add(activations.of_block(block))
        spoilt |= {layer for layer, several in kinds.items() if len(several) > 1}
        broken = {pair for pair in pairs if spoilt.intersection(pair)}
        if not broken:
            return sorted(pairs, key=lambda pair: pair[0].name)
        spoilt = spoilt.union(*broken)
        pairs -= broken


def _trace_parts(block, traces, loose):
    """Traces the largest parts that can be; `loose` are blocks outside of any part."""
    if isinstance(block, HybridBlock):
        try:
            traces += [_trace(block, training) for training in (True, False)]
            return
        except Exception:  # whatever a forward method does with a symbol
            pass
    for child in block._children.values():
        loose.add(child)
        _trace_parts(child, traces, loose)


def _trace(net, training):
    """(calls, graph): (block, input, output) of every call, and the graph as JSON."""
    calls, handles = [], []

    def remember(block, inputs, output):
        if len(inputs) == 1 and all(
            isinstance(value, mx.sym.Symbol) for value in (*inputs, output)
        ):
            calls.append((block, inputs[0].name, output.name))

    net.apply(lambda block: handles.append(block.register_forward_hook(remember)))
    try:
        with autograd.pause(train_mode=training):
            outputs = net(mx.sym.var("data"))
        if isinstance(outputs, (list, tuple)):
            outputs = mx.sym.Group(list(outputs))
        return calls, json.loads(outputs.tojson())
    finally:
        for handle in handles:
            handle.detach()


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
