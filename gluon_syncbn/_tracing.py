"""The guard of a layer against MXNet's early release of oneDNN copies.

Called by ``batch_norm.py`` while it is traced or run.

MXNet 1.9.1 makes a plain copy of an input that is in one of oneDNN's blocked layouts, and
frees it as soon as an asynchronous operator (ours) is *queued*
(src/imperative/imperative_utils.h, ``PushOperator``: ``inputs_fallback`` is local). So a
synchronous operator that neither speaks oneDNN nor works in place has to make the input,
and in backward the incoming gradient, plain before our operator is queued.

Graphs with ``static_shape=True`` keep the copies, but not for every node: one whose inputs
or outputs are those of the whole graph runs as in the other modes (src/imperative/
cached_op.cc, ``StaticInitExec``: ``dynamic_entries``). There it is enough that the layer
touches neither an input nor an output of the graph: an identity on both sides, which
costs nothing inside a graph, where it works in place.
"""
import sys

from mxnet.gluon import HybridBlock

_TRACE = HybridBlock._get_graph.__code__


def tracing_block():
    """The block whose graph is being built: the outermost one, whose flags will hold.

    None if there is none (imperative calls, symbols composed by hand). A layer's own
    flags can differ from those of the net that runs it, so the call stack is asked; this
    happens once per trace.
    """
    block, frame = None, sys._getframe()
    while frame is not None:
        if frame.f_code is _TRACE:
            block = frame.f_locals["self"]
        frame = frame.f_back
    return block


def guard_kind(contexts):
    """How the layer is to be guarded, see ``guard`` in src/mxnet/attributes.h.

    Parameters
    ----------
    contexts : list of mxnet.Context
        Where the layer runs; empty if that is not known.

    Returns
    -------
    str
        ``"gpu"``: not at all, no context is a CPU; ``"static_shape"``: by identities;
        ``"any"``: by copies, which are right in every mode.
    """
    if contexts and all(context.device_type == "gpu" for context in contexts):
        return "gpu"
    block = tracing_block()
    if block is not None:
        flags = dict(block._flags)
        if block._active and flags.get("static_alloc") and flags.get("static_shape"):
            return "static_shape"
    return "any"


def guarded(F, array, guard):
    """`array`, an input or output of our operator, behind the guard."""
    if guard == "any":
        return F.SliceChannel(array, num_outputs=1)
    if guard == "static_shape":
        return F.identity(array)
    return array
