"""The results of an experiment: a folder of JSON, one for each run or measurement.

Called by all parts of the ablation. It must not know MXNet: figures and tables are made
where it is not installed.
"""

import json
import math
import statistics
from pathlib import Path

# The statistics that a net is tested with: those from training, as they are or
# recomputed from the training images, and those of each batch of test images.
SCORES = {
    "running": "mIoU",
    "recomputed": "with recomputed statistics",
    "batch": "with batch statistics",
}
# Of the short run in float64: so far rounding has not been carried beyond 1e-9.
AGREEING_STEPS = 4


def rounded(value):
    """A JSON value with five digits of each number, and null for what is none."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


def load(folder):
    """All results in a folder by name, in the order of names."""
    paths = sorted(Path(folder).glob("*.json"))
    return {path.stem: json.loads(path.read_text()) for path in paths}


def runs(found, **wanted):
    """The runs among the results that have these values."""
    return [
        run
        for run in found.values()
        if run["kind"] == "run" and all(run[k] == v for k, v in wanted.items())
    ]


def score(run, statistics_kind="running", name="mean_iou"):
    """A score on the test split; 0 for a run that diverged before its first epoch."""
    return run["test"][statistics_kind][name] if "test" in run else 0.0


def has(run, kind):
    """Tells whether a run was tested so, or diverged before it could be."""
    return kind in run.get("test", SCORES)


def in_words(group, kind="running", *name):
    """Mean and standard deviation of the scores of some runs, which no line breaks."""
    values = [score(run, kind, *name) for run in group if has(run, kind)]
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.3f}"
    space = "\N{NO-BREAK SPACE}"
    spread = f"{space}±{space}{statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return mean + spread


def table(found):
    """Test scores of every arm as Markdown: mean and spread over the seeds."""
    tested = {kind for run in runs(found) for kind in run.get("test", ())}
    kinds = [kind for kind in SCORES if kind in tested]
    titles = ["net", "devices", "images each", "norm", "runs"]
    titles += [*(SCORES[kind] for kind in kinds), "pixel accuracy"]
    arms = {}
    for run in runs(found):
        key = run["model"], run["devices"], run["images"], run["norm"]
        arms.setdefault(key, []).append(run)
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for key in sorted(arms, key=lambda key: (key[0] != "fastscnn", *key)):
        group = arms[key]
        pixels = in_words(group, "running", "pixel_accuracy")
        scores = [in_words(group, kind) for kind in kinds]
        cells = [*key, len(group), *scores, pixels]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def summary(found):
    """mIoU by images per device as Markdown, both norms for each number of devices.

    Statistics of `nn.BatchNorm` recomputed, too, where any are.
    """
    fast = [r for r in runs(found, model="fastscnn") if r["devices"] > 1]
    counts = sorted({run["devices"] for run in fast})
    names = {
        ("bn", "running"): "`nn.BatchNorm`",
        ("bn", "recomputed"): "recomputed",
        ("syncbn", "running"): "`SyncBatchNorm`",
    }
    tested = {kind for run in fast for kind in run.get("test", ())}
    columns = [(c, *key) for c in counts for key in names if key[1] in tested]
    titles = [f"{count} devices, {names[(*key,)]}" for count, *key in columns]
    lines = ["| " + " | ".join(["images per device", *titles]) + " |"]
    lines.append("|---" * (1 + len(titles)) + "|")
    for images in sorted({run["images"] for run in fast}):
        cells = []
        for devices, norm, kind in columns:
            case = {"devices": devices, "norm": norm, "images": images}
            cells.append(in_words(runs(found, model="fastscnn", **case), kind))
        lines.append("| " + " | ".join([str(images), *cells]) + " |")
    return "\n".join(lines)


def claim(found, name):
    """The README's sentence about one image per device on the fewest devices."""
    devices = min(r["devices"] for r in runs(found) if r["devices"] > 1)
    case = {"model": "fastscnn", "devices": devices, "images": 1}
    bn, syncbn = (in_words(runs(found, **case, norm=n)) for n in ("bn", "syncbn"))
    return (
        f"With one image on each of {devices} devices, FastSCNN reaches an mIoU of "
        f"{syncbn} on the test images of {name} with `SyncBatchNorm`, and of {bn} with "
        "`nn.BatchNorm`."
    )
