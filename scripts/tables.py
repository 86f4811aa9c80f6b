"""Tables of pages, made of the JSON in scripts/results.

`cog -r -I scripts PAGE` calls them where a page has a block [[[cog ...]]], and
scripts/lint.sh compares. Nothing but Python's own library, so that it runs anywhere.
"""

import json
import statistics
from pathlib import Path

RESULTS = Path(__file__).with_name("results")
# The statistics that a net of the ablation was tested with, as a table names them.
SCORES = {
    "running": "mIoU",
    "recomputed": "with recomputed statistics",
    "batch": "with batch statistics",
}


def markdown(heads, rows):
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines) + "\n"


def rows_of(name):
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def versions():
    """The tests' results by versions of MXNet, Python and NumPy."""
    counts = "passed", "failed", "error", "skipped"
    rows = [
        [row["mxnet"], row["python"], row["numpy"]]
        + [
            ", ".join(f"{row['counts'][c]} {c}" for c in counts if c in row["counts"])
            or row["outcome"]
        ]
        for row in rows_of("mxnet_versions")
    ]
    return markdown(["MXNet", "Python", "NumPy", "tests"], rows)


def layer():
    """Milliseconds of one layer, forward and backward."""
    times = {
        (row["contexts"], row["place"], row["mode"], row["layer"]): row["median_ms"]
        for row in rows_of("benchmark_layer")
    }
    rows = [
        [contexts, place, mode]
        + [
            f"{times[contexts, place, mode, name]:.0f}"
            for name in ("gluon_syncbn", "BatchNorm", "contrib")
        ]
        for contexts in (1, 2)
        for place in ("inside", "convolutions")
        for mode in ("static_shape", "static_alloc", "hybridize", "imperative")
    ]
    ours = "gluon_syncbn", "`nn.BatchNorm` (unsynchronized)", "contrib `SyncBatchNorm`"
    return markdown(["contexts", "place", "mode", *ours], rows)


NETS = "FastSCNN", "FCN", "DeepLabV3"


def ratio(net, layer):
    """A step as a multiple of that with nn.BatchNorm, least and most of the modes."""
    times = {}
    for row in rows_of("benchmark_net"):
        if row["net"] == net:
            times.setdefault(row["mode"], {})[row["layer"]] = row["median_ms"]
    ratios = [time[layer] / time["BatchNorm"] for time in times.values()]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def nets(columns):
    """`ratio` of each net; names of layers by the headings of their columns."""
    rows = [[net, *(ratio(net, layer) for layer in columns.values())] for net in NETS]
    return markdown(["net", *columns], rows)


# ---- the ablation --------------------------------------------------------------------


def load(folder=RESULTS / "ablation"):
    """All runs in a folder by name, in the order of names."""
    paths = sorted(Path(folder).glob("*-seed*.json"))
    return {path.stem: json.loads(path.read_text()) for path in paths}


def select(found, **wanted):
    """Return the runs with these values."""
    return [run for run in found.values() if wanted.items() <= run.items()]


def score(run, kind="running", name="mean_iou"):
    """A score on the test split; 0 for a run that diverged."""
    return run["test"][kind][name] if "test" in run else 0.0


def in_words(runs, kind="running", name="mean_iou"):
    """Mean and standard deviation of the scores of some runs, which no line breaks."""
    values = [score(run, kind, name) for run in runs]
    words, space = f"{statistics.fmean(values):.3f}", "\N{NO-BREAK SPACE}"
    if len(values) > 1:
        words += f"{space}±{space}{statistics.stdev(values):.3f}"
    return words


def table(found):
    """Test scores of every arm as Markdown: mean and spread over the seeds."""
    keys, rows = ("model", "devices", "images", "norm"), []
    for arm in sorted({tuple(run[key] for key in keys) for run in found.values()}):
        runs = select(found, **dict(zip(keys, arm)))
        scores = [in_words(runs, kind) for kind in SCORES]
        rows.append([*arm, len(runs), *scores, in_words(runs, name="pixel_accuracy")])
    heads = ["net", "devices", "images each", "norm", "runs"]
    return markdown([*heads, *SCORES.values(), "pixel accuracy"], rows)


def summary(found, devices):
    """FastSCNN's mIoU by images per device, as Markdown."""
    columns = {
        "`nn.BatchNorm`": ("bn", "running"),
        "`nn.BatchNorm`, recomputed": ("bn", "recomputed"),
        "`SyncBatchNorm`": ("syncbn", "running"),
    }
    rows = []
    fast = select(found, model="fastscnn", devices=devices)
    for images in sorted({run["images"] for run in fast}):
        rows.append([images])
        for norm, kind in columns.values():
            runs = [r for r in fast if (r["images"], r["norm"]) == (images, norm)]
            rows[-1].append(in_words(runs, kind))
    return markdown(["images per device", *columns], rows)
