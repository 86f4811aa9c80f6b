"""Whether a layer needs a guard against MXNet's early release of oneDNN copies.

Called by ``batch_norm.py`` while it is traced or run.

MXNet 1.9.1 makes a plain copy of an input that is in one of oneDNN's blocked layouts, and
frees it as soon as an asynchronous operator (ours) is *queued*
(src/imperative/imperative_utils.h, ``PushOperator``: ``inputs_fallback`` is local). Only
graphs with ``static_shape=True`` keep the copies. Everywhere else on a CPU, a synchronous
operator that neither speaks oneDNN nor works in place has to make the input, and the
incoming gradient, plain before our operator is queued.
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
        ``"gpu"``: no guard, no context is a CPU; ``"static_shape"``: no guard, the graph
        keeps its copies; ``"yes"``: guard.
    """
    if contexts and all(context.device_type == "gpu" for context in contexts):
        return "gpu"
    block = tracing_block()
    if block is not None:
        flags = dict(block._flags)
        if block._active and flags.get("static_alloc") and flags.get("static_shape"):
            return "static_shape"
    return "yes"
