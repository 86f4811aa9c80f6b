"""Private state of Gluon's blocks: settings, children, graphs and running traces."""

from __future__ import annotations

import gc
import inspect
import itertools
import sys
from operator import attrgetter
from typing import Any, Iterable

import mxnet as mx
from mxnet.gluon import HybridBlock, nn

from ..compat import IS_GLUON_2
from ..nested import flatten

# The class that defines BatchNorm's forward: BatchNorm itself before MXNet 1.8, later a
# base class of BatchNorm and BatchNormReLU.
BatchNormBase = getattr(nn.basic_layers, "_BatchNorm", nn.BatchNorm)

# Code of MXNet's methods. Only the call stack shows that a method is running.
_TRACE_CODE = HybridBlock._get_graph.__code__
_BUILD_CODE = HybridBlock._build_cache.__code__

# Gluon 1 calls the `forward` of a hybridized block, which runs its graph. Gluon 2 runs
# the graph instead of `forward`.
FORWARD_RUNS_GRAPH = not IS_GLUON_2
CALLS_WITH_SYMBOLS = not IS_GLUON_2  # Gluon 2 lets nobody call a block with symbols

settings_of = attrgetter("_kwargs")  # the arguments of a BatchNorm's operator
_numbers = itertools.count()


# ---- Names. Blocks of Gluon 2 have none.


def make_named(cls: Any, name: str, **options: Any) -> Any:
    """Return a block of a class, with a name if blocks have one."""
    return cls(**options) if IS_GLUON_2 else cls(prefix=f"{name}_", **options)


def given_name(block: mx.gluon.Block) -> str:
    """Return the name that Gluon has given to a block, or a numbered name."""
    return f"{block._alias()}{next(_numbers)}" if IS_GLUON_2 else block._name


def name_of(block: mx.gluon.Block) -> str:
    """Return a block's name, or its class's name in Gluon 2, where blocks have none."""
    return type(block).__name__ if IS_GLUON_2 else block.name


def names_in(net: mx.gluon.Block) -> dict:
    """Return each block's name in a net; in Gluon 2 its path, as in parameter files."""
    if not IS_GLUON_2:
        return {block: block.name for block in blocks_of(net)}
    names: dict = {}

    def visit(block, place):
        if block not in names:
            names[block] = place or name_of(block)
            for name, child in children_of(block).items():
                visit(child, f"{place}.{name}" if place else name)

    visit(net, "")
    return names


def name_of_parameter(name: str, place: str) -> str:
    """Return a name in ``block.params`` as a name in the net; `names_in` has `place`.

    In Gluon 1 it is unique already.
    """
    return f"{place}.{name}" if IS_GLUON_2 else name


# ---- Children, settings and parameters.


def children_of(block: mx.gluon.Block) -> dict:
    """Return a block's children by their names."""
    if not IS_GLUON_2:
        return block._children
    return {name: child() for name, child in block._children.items()}


def blocks_of(net: mx.gluon.Block) -> list:
    """Return the blocks of a net without duplicates, children first."""
    found, pending = [], [net]
    while pending:
        block = pending.pop()
        found.append(block)
        children = block._children.values()
        pending.extend([child() for child in children] if IS_GLUON_2 else children)
    return list(dict.fromkeys(reversed(found)))


def set_settings(block: mx.gluon.Block, settings: dict) -> None:
    block._kwargs = settings


def parameters_by_place(net: mx.gluon.Block) -> dict:
    """Return a net's parameters by their path, as in parameter files."""
    return net._collect_params_with_prefix()


def set_parameter(
    block: mx.gluon.Block, name: str, parameter: mx.gluon.Parameter
) -> None:
    """Replace a parameter of a block, which Gluon's `__setattr__` refuses."""
    block._reg_params[name] = vars(block)[name] = parameter


def count_inputs(block: mx.gluon.Block) -> int | None:
    """Return the largest number of inputs of a block, or None if it has no limit."""
    if isinstance(block, BatchNormBase):
        return 1  # a mask of SyncBatchNorm is not counted
    if isinstance(block, mx.gluon.SymbolBlock):
        return len(block._cached_graph[0])
    forward, names = type(block).forward, {"self", "F", *block._reg_params}
    if forward is HybridBlock.forward and not IS_GLUON_2:
        forward = type(block).hybrid_forward
    parameters = inspect.signature(forward).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        is_container = isinstance(block, (nn.Sequential, nn.HybridSequential))
        children = list(children_of(block).values())
        return count_inputs(children[0]) if is_container and children else None
    named = {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    return len(named - names)


def graph_of(block: mx.gluon.HybridBlock) -> mx.sym.Symbol | None:
    """Return the graph of a SymbolBlock, or of a block that was traced, or None."""
    cached = vars(block).get("_cached_graph")
    return cached[1] if cached else None


def set_graph(block: mx.gluon.SymbolBlock, symbol: mx.sym.Symbol) -> None:
    """Replace the graph of a SymbolBlock, but not its inputs."""
    block._cached_graph = block._cached_graph[0], symbol


def forget_graph(block: mx.gluon.Block) -> None:
    """Make a hybridized block trace its graph in its next call."""
    if isinstance(block, HybridBlock):
        block._clear_cached_op()  # `hybridize` would reset the flags of all children


def forget_graphs_with(parameters: Iterable) -> None:
    """Make each block whose graph contains one of the parameters trace again."""
    parameters = list(parameters)
    names = {parameter.var().name for parameter in parameters}
    # A block has no list of its parents, so the garbage collector lists all blocks.
    for block in gc.get_objects() if names else ():
        graph = graph_of(block) if issubclass(type(block), HybridBlock) else None
        if graph is not None and not names.isdisjoint(graph.list_inputs()):
            # Another thread may run another net with the same names of parameters.
            own = set(map(id, block.collect_params().values()))
            if not own.isdisjoint(map(id, parameters)):
                forget_graph(block)


def is_hybridized(block: mx.gluon.Block) -> bool:
    return bool(getattr(block, "_active", False))


def add_pre_hook(block: mx.gluon.Block, hook: Any) -> None:
    """Call `hook(block, inputs)` before each call of a block; register it once."""
    if hook not in block._forward_pre_hooks.values():
        block.register_forward_pre_hook(hook)


def is_traced(leaves: Iterable) -> bool:
    """Return True if a call with these arguments is being traced."""
    if IS_GLUON_2:
        return mx._deferred_compute.is_deferred_compute()
    return any(isinstance(leaf, mx.sym.Symbol) for leaf in leaves)


class ComputedBatchNorm(nn.BatchNorm):
    """A BatchNorm whose subclasses have a method `compute(F, *inputs, **parameters)`.

    `F` is ``mx.nd`` or ``mx.sym``. The inputs, the parameters and the result are arrays
    or symbols of `F`; in NumPy semantics they are converted.
    """

    def forward(self, *inputs: Any) -> Any:
        if not IS_GLUON_2:
            return HybridBlock.forward(self, *inputs)  # calls `hybrid_forward`
        context = inputs[0].context
        parameters = {name: p.data(context) for name, p in self._reg_params.items()}
        return self._compute(mx.nd, *inputs, **parameters)

    def _compute(self, F, *inputs, **parameters):
        if not (IS_GLUON_2 or mx.util.is_np_array()):
            return self.compute(F, *inputs, **parameters)
        plain = {name: p.as_nd_ndarray() for name, p in parameters.items()}
        inputs = [x.as_nd_ndarray() for x in inputs]
        return self.compute(F, *inputs, **plain).as_np_ndarray()

    if IS_GLUON_2:

        def infer_shape(self, x: Any, *_others: Any) -> None:
            super().infer_shape(x)

    else:
        hybrid_forward = _compute


# The methods that run a block when it is called.
_RUN_METHODS = ("forward",) if FORWARD_RUNS_GRAPH else ("forward", "_call_cached_op")


class ForwardReplacement:
    """A base class of callables that replace the methods that run a net."""

    def __init__(self, net: mx.gluon.Block) -> None:
        self.net = net
        self.replaced = {n: vars(net)[n] for n in _RUN_METHODS if n in vars(net)}

    def install(self) -> None:
        for name in _RUN_METHODS if isinstance(self.net, HybridBlock) else ("forward",):
            setattr(self.net, name, self)

    def remove(self) -> None:
        """Restore the functions that this object has replaced.

        A later object may have replaced this one: make_parallel accepts a net of
        allow_plain_loop.
        """
        latest = vars(self.net)["forward"]
        attributes = vars(self.net) if latest is self else latest.replaced
        for name in _RUN_METHODS:
            attributes.pop(name, None)
        attributes.update(self.replaced)

    def run_replaced(self, *args: Any) -> Any:
        name = "forward"
        if not FORWARD_RUNS_GRAPH and is_hybridized(self.net) and not is_traced(args):
            name = "_call_cached_op"
        if name in self.replaced:
            return self.replaced[name](*args)
        return getattr(type(self.net), name)(self.net, *args)


def _variables_of(code):
    """Yield the variables of a function's running calls, innermost first."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is code:
            yield frame.f_locals
        frame = frame.f_back


def traced_block() -> mx.gluon.HybridBlock | None:
    """Return the outermost block that this thread is tracing, or None."""
    traced = [variables["self"] for variables in _variables_of(_TRACE_CODE)]
    return traced[-1] if traced else None


def current_build() -> tuple[mx.gluon.HybridBlock | None, dict]:
    """Return the block whose CachedOp this thread makes, and its inputs by name."""
    for found in _variables_of(_BUILD_CODE):
        names = [symbol.name for symbol in found["data"]]
        arrays = [value for value in flatten(found["args"]) if value is not None]
        return found["self"], dict(zip(names, arrays))
    return None, {}
