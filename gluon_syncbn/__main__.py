"""``python -m gluon_syncbn`` checks the installation, or lists causes of hangs."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import signal
import sys
from pathlib import Path
from typing import Sequence

import mxnet as mx
import numpy as np

from . import installation
from .compat import __version__
from .contexts import available_contexts
from .layer import native_operator
from .native.library import features

ROW = "{:<4}{:<18}{:<12}{:<9}{:<8}{}"
# The allowed error, relative to the largest value, in units of the dtype's epsilon.
# Rounding errors are far smaller, and errors of unsynchronized statistics far larger.
BOUND = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; return the exit status, 1 if a result is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m gluon_syncbn",
        description="Print what gluon_syncbn was built with and which devices exist, "
        "and check training steps of the layer on two CPU contexts, and on up to two "
        "GPUs, against batch normalization of the whole batch in float64.",
        epilog="The exit status is 1 if a result is wrong or a layer fails, else 0.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument(
        "topic",
        nargs="?",
        choices=["hang"],
        help="instead print common causes of a wait for a device, and fixes",
    )
    if parser.parse_args(arguments).topic == "hang":
        page = Path(__file__).with_name("hang.md").read_text(encoding="utf-8")
        page = re.sub(r"!\[.*\n\n", "", page)  # no pictures
        print(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", page))  # no links
        return 0
    built = features()
    has_cuda = mx.runtime.Features().is_enabled("CUDA")
    mxnet = f"MXNet {mx.__version__} with{'' if has_cuda else 'out'} CUDA"
    print(f"gluon_syncbn {built.pop('version')}, {mxnet}")
    for name, value in built.items():
        print(f"  {name}: {value or 'none'}")
    reason = native_operator.missing()
    print(f"  native operator: {f'no, because {reason}' if reason else 'yes'}")
    gpus = [c for c in available_contexts() if c.device_type == "gpu"]
    context_lists = [[mx.cpu(0), mx.cpu(1)]]
    if gpus and built["cuda"]:
        context_lists.append(gpus[:2])
    cores = len(os.sched_getaffinity(0))
    print(f"devices: {cores} CPU cores, {len(gpus)} GPUs\n")
    print(ROW.format("", "contexts", "mode", "dtype", "error", "limit"))
    modes, dtypes = ("imperative", "hybridized"), ("float32", "float64")
    try:
        for case in itertools.product(context_lists, modes, dtypes):
            _check(*case)
    except (ArithmeticError, mx.MXNetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("All checks passed.")
    return 0


def _check(contexts, mode, dtype):
    """Print a row of the table; raise ArithmeticError if a result is wrong."""
    errors = installation.check(contexts, mode, dtype)
    limit = BOUND * np.finfo(dtype).eps
    for name, error in errors.items():
        if not error <= limit:  # it may be NaN
            raise ArithmeticError(
                f"{name} is wrong on {' and '.join(map(str, contexts))}, {mode}, "
                f"{dtype}: the difference from the float64 reference must be at most "
                f"{limit:.2g} of the largest value, got {error:.2g}"
            )
    numbers = f"{max(errors.values()):.0e}", f"{limit:.0e}"
    print(ROW.format("ok", ", ".join(map(str, contexts)), mode, dtype, *numbers))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader like `head` may end early
    sys.exit(main())
