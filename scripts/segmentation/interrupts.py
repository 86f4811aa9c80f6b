"""Ctrl-C between steps: one in the middle of MXNet's work can crash the process.

Called by the epoch loop and the evaluation. The first Ctrl-C is noted and obeyed after
the step under way; a second one is obeyed at once.
"""

import signal

import mxnet as mx

_requested = False


def install():
    """From now on SIGINT is noted; to be called in the main thread.

    Where it is ignored, as in a shell's background jobs, it stays so.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _note)


def check():
    """Raises KeyboardInterrupt if Ctrl-C was noted, with no work left in flight."""
    if _requested:
        mx.nd.waitall()
        raise KeyboardInterrupt


def _note(signum, frame):
    global _requested
    if _requested:
        raise KeyboardInterrupt
    _requested = True
