"""Tables for the pages, made from the JSON files in scripts/results.

`cog -r -I scripts PAGE` writes them into the [[[cog ...]]] blocks of a page, and
scripts/lint.sh checks that they are up to date. cog needs only the standard library.
"""

import itertools
import json
import statistics
from pathlib import Path

RESULTS = Path(__file__).with_name("results")
# Kinds of statistics in the ablation, and headings for the scores with them.
SCORES = {
    "running": "mIoU",
    "recomputed": "with recomputed statistics",
    "batch": "with batch statistics",
}


def markdown(heads, rows):
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines) + "\n"


def document_of(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows_of(name):
    return document_of(name)["rows"]


def machine(name):
    """Return a sentence about the machine and the versions of a benchmark."""
    document = document_of(name)
    return (
        "Measured on {cores} cores of {processor} with {gb_s:.0f} GB/s of copy "
        "bandwidth, with MXNet {mxnet} and gluon_syncbn {gluon_syncbn}.\n"
    ).format(**document["machine"], gb_s=document["copy_gb_s"])


def versions():
    """Return a table of test results by versions of MXNet, Python and NumPy."""
    rows = []
    for row in rows_of("mxnet_versions"):
        names = [
            n for n in ("passed", "failed", "error", "skipped") if n in row["counts"]
        ]
        counts = ", ".join(f"{row['counts'][name]} {name}" for name in names)
        versions = row["mxnet"], row["python"], row["numpy"]
        rows.append([*versions, counts or row["outcome"]])
    return markdown(["MXNet", "Python", "NumPy", "tests"], rows)


def layer():
    """Return a table of milliseconds of one layer, forward and backward."""
    times = {
        (row["contexts"], row["place"], row["mode"], row["layer"]): row["median_ms"]
        for row in rows_of("benchmark_layer")
    }
    modes = "static_shape", "static_alloc", "hybridize", "imperative"
    layers = "gluon_syncbn", "BatchNorm", "contrib"
    places = {"inside": "identities", "convolutions": "convolutions"}
    rows = [
        [n, places[place], mode, *(f"{times[n, place, mode, x]:.0f}" for x in layers)]
        for n, place, mode in itertools.product((1, 2), places, modes)
    ]
    heads = "gluon_syncbn", "`nn.BatchNorm` (unsynchronized)", "contrib `SyncBatchNorm`"
    return markdown(["contexts", "neighbours", "mode", *heads], rows)


NETS = "FastSCNN", "FCN", "DeepLabV3"
LAYERS = {
    "gluon_syncbn, MXNet's defaults": "gluon_syncbn",
    "MXNet's own SyncBatchNorm, two workers": "contrib",
}


def ratio(net, layer):
    """Return the time of a step divided by the time with nn.BatchNorm beside it.

    It is a range over Gluon's modes, from the lowest to the highest ratio.
    """
    times = {}
    for row in rows_of("benchmark_net"):
        if row["net"] == net:
            process = row["mode"], row["workers"]
            times.setdefault(process, {})[row["layer"]] = row["median_ms"]
    ratios = [t[layer] / t["BatchNorm"] for t in times.values() if layer in t]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def nets():
    """Return a table of `ratio`, with the bandwidth of the machine in its heading."""
    rows = [[net, *(ratio(net, layer) for layer in LAYERS.values())] for net in NETS]
    gb_s = document_of("benchmark_net")["copy_gb_s"]
    return markdown([f"net (memory: {gb_s:.0f} GB/s)", *LAYERS], rows)


def memory():
    """Return a table of megabytes kept after forward, and of peaks, by variant."""
    cells = {}
    for row in rows_of("benchmark_memory"):
        text = "{after_forward_mb:.0f} / {peak_mb:.0f}".format(**row)
        cells.setdefault(row["mode"], {})[row["variant"]] = text
    rows = [[mode, *texts.values()] for mode, texts in cells.items()]
    return markdown(["mode", *next(iter(cells.values()))], rows)


def load(folder=RESULTS / "ablation"):
    """Return the runs of an ablation by file name."""
    paths = sorted(Path(folder).glob("*-seed*.json"))
    return {path.stem: json.loads(path.read_text()) for path in paths}


def select(runs, **wanted):
    """Return the runs with the wanted values."""
    return [run for run in runs.values() if wanted.items() <= run.items()]


def score(run, kind="running", name="mean_iou"):
    """Return a score on the test split, or 0 if the run diverged."""
    return run["test"][kind][name] if "test" in run else 0.0


def mean_score(runs, kind="running", name="mean_iou"):
    """Return the mean and the standard deviation of the scores of some runs."""
    values = [score(run, kind, name) for run in runs]
    text, space = f"{statistics.fmean(values):.3f}", "\N{NO-BREAK SPACE}"
    if len(values) > 1:
        text += f"{space}±{space}{statistics.stdev(values):.3f}"
    return text


def table(runs):
    """Return a table of the test scores of every arm, over its seeds."""
    keys, rows = ("model", "devices", "images", "norm"), []
    for arm in sorted({tuple(run[key] for key in keys) for run in runs.values()}):
        own = select(runs, **dict(zip(keys, arm)))
        scores = [mean_score(own, kind) for kind in SCORES]
        rows.append([*arm, len(own), *scores, mean_score(own, name="pixel_accuracy")])
    heads = ["net", "devices", "images each", "norm", "runs"]
    return markdown([*heads, *SCORES.values(), "pixel accuracy"], rows)


def summary(runs, devices):
    """Return a table of FastSCNN's mIoU on some devices by images per device."""
    columns = {
        "`nn.BatchNorm`": ("bn", "running"),
        "`nn.BatchNorm`, recomputed": ("bn", "recomputed"),
        "`SyncBatchNorm`": ("syncbn", "running"),
    }
    rows, case = [], {"model": "fastscnn", "devices": devices}
    for images in sorted({run["images"] for run in select(runs, **case)}):
        rows.append([images])
        for norm, kind in columns.values():
            own = select(runs, **case, images=images, norm=norm)
            rows[-1].append(mean_score(own, kind))
    return markdown(["images per device", *columns], rows)
