"""Folds activation blocks into the batch normalizations in front of them.

Called by ``convert.py``. It must not know what a layer does with its activation.

Which block reads which block's output is not written down anywhere in Gluon, so the net
is traced: forward hooks tell which node belongs to which block, and the graph tells who
else reads it. A Sequential that cannot be traced as a whole is taken apart, because it
calls each of its children as a whole; what else cannot be traced stays as it is.
"""

import contextlib
import json
import warnings

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import HybridBlock, nn

from . import activations


class Folded(HybridBlock):
    """What an activation block is while a layer in front of it has taken it in."""

    def forward(self, x, *args):
        return x

    def __repr__(self):
        activation, slope = self._folded
        return f"Folded({activation}{'' if slope is None else f', {slope}'})"


class Fold:
    """Layers that have got an activation, and the blocks that it is from.

    Mostly one of each; several blocks may stand behind one layer that is used several
    times, and one block behind several layers. They are unfolded together.
    """

    def __init__(self):
        self.layers, self.blocks = [], []

    def undo(self):
        """Gives the blocks their activations back."""
        for block in self.blocks:
            block.__class__ = block._folded_from
            del block._folded_from, block._folded, block._fold
        for layer in self.layers:
            layer.set_activation(None)


def fold(pairs):
    """Gives each layer the activation of the block with it, see `find_pairs`."""
    for layer, block in pairs:
        if not isinstance(block, Folded):
            block._folded_from, block._folded = type(block), activations.of_block(block)
            block.__class__, block._fold = Folded, layer._fold or Fold()
            block._fold.blocks.append(block)
        both = block._fold
        if layer._fold not in (None, both):  # its own, from another block
            both.blocks += layer._fold.blocks
            both.layers += layer._fold.layers
            for member in layer._fold.blocks + layer._fold.layers:
                member._fold = both
        elif layer._fold is None:
            both.layers.append(layer)
        layer.set_activation(*block._folded, fold=both)


def check_can_unfold(net):
    """Raises ValueError if a fold reaches beyond the net, which would change it."""
    inside = set()
    net.apply(inside.add)
    for layer in inside:
        fold = getattr(layer, "_fold", None)
        outside = set() if fold is None else {*fold.layers, *fold.blocks} - inside
        if outside:
            names = ", ".join(sorted(block.name for block in outside))
            raise ValueError(
                f"{layer.name} was fused with {names}, which is not part of "
                f"{net.name}: revert a net that holds both"
            )


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
    error = "it is no HybridBlock"
    if isinstance(block, HybridBlock):
        try:
            traces += [_trace(block, training) for training in (True, False)]
            return
        except Exception as caught:  # whatever a forward method does with a symbol
            error = f"{type(caught).__name__}: {caught}".splitlines()[0]
    if isinstance(block, (nn.Sequential, nn.HybridSequential)):
        for child in block._children.values():
            loose.add(child)
            _trace_parts(child, traces, loose)
    elif block._children:
        warnings.warn(
            f"{block.name} keeps its activation blocks, because it cannot be traced "
            f"({error}); convert such parts of it that are called as a whole",
            stacklevel=2,
        )


@contextlib.contextmanager
def _hooks_replaced(net, hook):
    """Without the user's hooks, which expect arrays; with one forward hook."""
    blocks = set()
    net.apply(blocks.add)
    saved = [(b, b._forward_hooks, b._forward_pre_hooks) for b in blocks]
    for block, hooks, before in saved:
        block._forward_hooks, block._forward_pre_hooks = type(hooks)(), type(before)()
        block.register_forward_hook(hook)
    try:
        yield
    finally:
        for block, hooks, before in saved:
            block._forward_hooks, block._forward_pre_hooks = hooks, before


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
    with _hooks_replaced(net, remember), autograd.pause(train_mode=training):
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
