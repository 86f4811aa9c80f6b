"""``python -m gluon_syncbn`` checks the installation, ``... hang`` explains a wait."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Sequence

import mxnet as mx

from .native.library import features
from .tools import check
from .tools.contexts import available_contexts


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report; returns the exit status, 1 if a result is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m gluon_syncbn",
        description="Prints what gluon_syncbn was built with and which devices "
        "exist, and compares the layer on two contexts with batch normalization of the "
        "whole batch in float64.",
    )
    parser.add_argument(
        "topic",
        nargs="?",
        choices=["hang"],
        help="print why devices wait for each other, and the cures, instead",
    )
    if parser.parse_args(arguments).topic == "hang":
        print(_section_of_waits())
        return 0
    built = features()
    print(f"gluon_syncbn {built.pop('version')}, MXNet {mx.__version__}")
    for name, value in built.items():
        print(f"  {name}: {_in_words(value)}")
    gpus = [c for c in available_contexts() if c.device_type == "gpu"]
    places = _places(gpus)
    cores = len(os.sched_getaffinity(0))
    print(f"devices: {cores} CPU cores, {_gpus_in_words(gpus, places)}")
    try:
        for contexts in places:
            for mode in check.MODES:
                for dtype in check.DTYPES:
                    print(check.check(contexts, mode, dtype))
    except (check.WrongResultError, mx.MXNetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _section_of_waits():
    """Return the section of docs/guides/hang.md about the error of a timeout."""
    page = Path(__file__).with_name("hang.md").read_text(encoding="utf-8")
    return page.split("(waited)=\n")[1].split("\n### ")[0].lstrip("# ")


def _places(gpus):
    """The lists of contexts that are checked: two of the CPU, and the first GPUs."""
    two_cpus = [mx.cpu(0), mx.cpu(1)]
    return [two_cpus, gpus[:2]] if gpus and features()["cuda"] else [two_cpus]


def _gpus_in_words(gpus, places):
    if not mx.runtime.Features().is_enabled("CUDA"):
        return "no GPUs, because this MXNet was built without CUDA"
    if gpus and len(places) == 1:
        return f"{len(gpus)} GPUs, which gluon_syncbn was built without CUDA for"
    return f"{len(gpus)} GPUs"


def _in_words(value):
    if isinstance(value, bool):
        return "yes" if value else "no"
    words = " ".join(value) if isinstance(value, list) else str(value)
    return words or "none"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader like `head` may end early
    sys.exit(main())
