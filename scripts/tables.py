"""Tables for the pages, made from the JSON files in scripts/results.

`cog -r -I scripts PAGE` writes them into the [[[cog ...]]] blocks of a page, and
scripts/lint.sh checks that they are up to date. cog needs only the standard library.
An argument `name` is the path of a JSON file, absolute or in scripts/results.
"""

import json
import math
import statistics
from pathlib import Path

RESULTS = Path(__file__).with_name("results")
# Statistics with which ablation.py scores each net, and headings for these scores.
SCORES = {
    "running": "mIoU",
    "recomputed": "with recomputed statistics",
    "batch": "with batch statistics",
}


def markdown(heads, rows):
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines) + "\n"


def read(name):
    return json.loads((RESULTS / name).read_text())


def pivot(name, keys, column, text):
    """Return rows: the values of `keys`, then a `text` for each value of `column`."""
    cells = {}
    for row in read(name)["rows"]:
        texts = cells.setdefault(tuple(row[key] for key in keys), {})
        texts[row[column]] = text.format(**row)
    return [[*values, *texts.values()] for values, texts in cells.items()]


def machine(name):
    """Return a sentence about the machine and the versions of a benchmark."""
    document = read(name)
    return (
        "Measured on {cores} cores of {processor} with {gb_s:.0f} GB/s of copy "
        "bandwidth, with MXNet {mxnet} and gluon_syncbn {gluon_syncbn}.\n"
    ).format(**document["machine"], gb_s=document["copy_gb_s"])


def versions():
    """Return a table with a row for each MXNet and a column for each Python."""
    outcomes = {}
    for row in read("mxnet_versions.json")["rows"]:
        outcomes.setdefault(row["mxnet"], {})[row["python"]] = row["outcome"]
    pythons = list(outcomes["1.9.1"])
    rows = [[m, *(of.get(p, "") for p in pythons)] for m, of in outcomes.items()]
    return markdown(["MXNet", *(f"Python {p}" for p in pythons)], rows)


def layer(name="benchmark_layer.json"):
    """Return a table of milliseconds. `place` names the blocks around the layer."""
    heads = ["contexts", "neighbours", "mode", "gluon_syncbn"]
    heads += ["`nn.BatchNorm` (unsynchronized)", "contrib `SyncBatchNorm`"]
    keys = "contexts", "place", "mode"
    return markdown(heads, pivot(name, keys, "layer", "{median_ms:.0f}"))


def bound(name="benchmark_layer.json"):
    """Return the milliseconds that memory alone needs for a layer's step."""
    document = read(name)
    # Forward reads x twice and writes y; backward reads x and dy twice and writes dx.
    numbers = 8 * math.prod(document["rows"][0]["shape"])
    return f"{numbers * 4 / document['copy_gb_s'] / 1e6:.1f}"


def nets(name="benchmark_net.json", only=()):
    """Return a table of times of a training step relative to nn.BatchNorm's.

    `only` has the nets of the table, or nothing for all. A cell is the lowest and the
    highest ratio of its modes. In the file, each row of a layer precedes the row of
    nn.BatchNorm from the same process, mode and kind of step.
    """
    document, ratios = read(name), {}
    for row, base in zip(document["rows"][::2], document["rows"][1::2]):
        kind = row["layer"], row["update"]
        kinds = ratios.setdefault((row["net"], row["contexts"]), {})
        kinds.setdefault(kind, []).append(row["median_ms"] / base["median_ms"])
    rows = []
    for case, kinds in ratios.items():
        if only and case[0] not in only:
            continue
        columns = ("gluon_syncbn", False), ("gluon_syncbn", True), ("contrib", True)
        found = [kinds.get(column, []) for column in columns]
        texts = [[f"{ratio:.2f}" for ratio in sorted(r)] for r in found]
        rows.append(
            [*case, *(" to ".join(dict.fromkeys(t[:1] + t[-1:])) for t in texts)]
        )
    head = f"net, on a machine that copies {document['copy_gb_s']:.0f} GB/s"
    ours = "gluon_syncbn, forward and backward", "gluon_syncbn, whole step"
    contrib = "MXNet's SyncBatchNorm, whole step"
    return markdown([head, "contexts", *ours, contrib], rows)


def memory(name="benchmark_memory.json"):
    """Return a table of megabytes kept after forward, and of peaks, by variant."""
    text = "{after_forward_mb:.0f} / {peak_mb:.0f}"
    heads = ["mode", "BatchNorm", "SyncBatchNorm", "built in"]
    return markdown(heads, pivot(name, ["mode"], "variant", text))


def load(folder=RESULTS / "ablation"):
    """Return the runs of an ablation by arm (net, devices, images per device, norm)."""
    arms = {}
    for path in sorted(Path(folder).glob("*-seed*.json")):
        run = json.loads(path.read_text())
        arm = run["model"], run["devices"], run["images"], run["norm"]
        arms.setdefault(arm, []).append(run)
    return dict(sorted(arms.items()))


def mean_score(runs, kind="running", score="mean_iou"):
    """Return a test score's mean and standard deviation.

    Runs with GroupNorm, which has no statistics, have no scores with other statistics.
    """
    if any(kind not in run["test"] for run in runs):
        return ""
    scores = [run["test"][kind][score] for run in runs]
    text, space = f"{statistics.fmean(scores):.3f}", "\N{NO-BREAK SPACE}"
    if len(scores) > 1:
        text += f"{space}±{space}{statistics.stdev(scores):.3f}"
    return text


def table(arms):
    rows = []
    for arm, runs in arms.items():
        scores = [mean_score(runs, kind) for kind in SCORES]
        accuracy = mean_score(runs, score="pixel_accuracy")
        version = min(run["machine"]["gluon_syncbn"] for run in runs)
        rows.append([*arm, len(runs), *scores, accuracy, version])
    heads = ["net", "devices", "images each", "norm", "runs"]
    return markdown([*heads, *SCORES.values(), "pixel accuracy", "version"], rows)


NORMS = {
    "`nn.BatchNorm`": ("bn", "running"),
    "`nn.BatchNorm`, recomputed": ("bn", "recomputed"),
    "`SyncBatchNorm`": ("syncbn", "running"),
    "GroupNorm": ("gn8", "running"),
}


def runs_of(arms, norm, devices, images):
    """Return the runs of FastSCNN with some images on each device.

    GroupNorm was trained on one device with the same batches, because it normalizes
    each image alone.
    """
    on_one = 1, devices * images
    batch = on_one if norm.startswith("gn") else (devices, images)
    return arms[("fastscnn", *batch, norm)]


def summary(arms, devices, norms=4):
    """Return a table of mIoU with the first `norms` NORMS, by images per device."""
    rows, columns = [], dict([*NORMS.items()][:norms])
    for images in 1, 2, 4:
        rows.append([images])
        for norm, kind in columns.values():
            rows[-1].append(mean_score(runs_of(arms, norm, devices, images), kind))
    return markdown(["images per device", *columns], rows)
