"""Draws a step as MXNet's profiler shows it: what devices do, and who waits for whom.

    python scripts/draw_trace.py [FILE]  # docs/_static/trace.png without a name

A small net trains on two contexts, and cpu(1) has three times as much to do before its
layers. The trace itself, a JSON file for Perfetto or chrome://tracing, is temporary.
"""

import json
import sys
import tempfile
from pathlib import Path

import gluon_syncbn

import matplotlib
import mxnet as mx
from matplotlib import pyplot
from mxnet import autograd, gluon
from mxnet.gluon import nn

matplotlib.use("Agg")
FOLDER = Path(__file__).parent
PICTURE = FOLDER.parent / "docs" / "_static" / "trace.png"
COLOURS = {
    "MXNet's operators": "0.75",
    "local pass": "tab:blue",
    "second pass": "tab:green",
    "wait for others": "tab:orange",
}
CONTEXTS = [mx.cpu(0), mx.cpu(1)]
SLOWER = 3  # convolutions of cpu(1) for each of cpu(0)


class Uneven(nn.HybridSequential):
    """Blocks of convolution and norm; the convolution is repeated on cpu(1)."""

    def forward(self, x):
        for block in self._children.values():
            repeat = SLOWER if x.context == mx.cpu(1) and "conv" in block.name else 1
            x = mx.nd.add_n(*(block(x) for _ in range(repeat))) / repeat
        return x


def trace_of_a_step(file: Path) -> list:
    """The events of one step, after one that the profiler has not seen."""
    net = Uneven()
    for _ in range(3):
        net.add(nn.Conv2D(16, 3, padding=1), gluon_syncbn.SyncBatchNorm())
    net = gluon_syncbn.make_parallel(net, CONTEXTS)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    x = mx.nd.random.normal(shape=(4, 16, 96, 96))
    mx.profiler.set_config(profile_all=True, filename=str(file))
    for state in "stop", "run":
        mx.profiler.set_state(state)
        with autograd.record():
            loss = (net(x) ** 2).mean()
        loss.backward()
        trainer.step(1)
        mx.nd.waitall()
    mx.profiler.set_state("stop")
    mx.profiler.dump()
    return json.loads(file.read_text())["traceEvents"]


def spans_of(events: list, context: mx.Context) -> list:
    """(what, begin, end) of all that a device does, in microseconds."""
    begun, spans = {}, []
    for event in events:
        is_ours = event.get("cat") == f"SyncBatchNorm {context}"
        is_mxnets = event["ph"] in "BE" and event["pid"] == context.device_id
        if not is_ours and not is_mxnets:
            continue
        key = event["name"], event["tid"]
        if event["ph"] in "bB":
            begun[key] = event["ts"]
        elif key in begun:
            what = event["name"].split(",")[0] if is_ours else "MXNet's operators"
            spans.append((what, begun.pop(key), event["ts"]))
    return sorted(spans, key=lambda span: list(COLOURS).index(span[0]))


def main(file: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        events = trace_of_a_step(Path(folder, "trace.json"))
    rows = [spans_of(events, context) for context in CONTEXTS]
    start = min(begin for spans in rows for _, begin, _ in spans)
    pyplot.style.use(FOLDER / "figures.mplstyle")
    figure, axes = pyplot.subplots(figsize=(8, 1.9))
    for row, spans in enumerate(rows):
        for what, begin, end in spans:
            place = (begin - start) / 1e3
            axes.barh(row, (end - begin) / 1e3, left=place, color=COLOURS[what])
    axes.set_yticks(range(len(rows)), map(str, CONTEXTS))
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of a step")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=c) for c in COLOURS.values()]
    figure.legend(handles, COLOURS, loc="outside upper center", ncols=len(COLOURS))
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main(Path(*sys.argv[1:2]) if sys.argv[1:] else PICTURE)
