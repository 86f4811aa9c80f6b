"""The README's code runs; its figures, as the benchmarks' page's, are the JSON's."""

import doctest
import json
import re
import statistics
from pathlib import Path

import pytest
from ablation import results

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text()
RESULTS = ROOT / "scripts" / "results"


def rows_of(benchmark):
    return json.loads((RESULTS / f"benchmark_{benchmark}.json").read_text())["rows"]


def test_the_example_of_make_parallel_is_true():
    failed, tried = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert failed == 0 and tried > 15


@pytest.mark.parametrize("row", re.findall(r"^\| (\d) \|(.*)\|$", BENCHMARKS, re.M))
def test_figures_are_those_of_the_json(row):
    contexts, cells = int(row[0]), [cell.strip() for cell in row[1].split("|")]
    place, mode, *figures = cells
    rows = rows_of("layer")
    for layer, figure in zip(("gluon_syncbn", "BatchNorm", "contrib"), figures):
        (match,) = (
            r
            for r in rows
            if (r["contexts"], r["place"], r["mode"], r["layer"])
            == (contexts, place, mode, layer)
        )
        assert figure == f"{match['median_ms']:.0f}"


def test_first_steps_are_those_of_the_json():
    rows = {
        (r["memory"], str(r["busy_processes"]), r["mode"], r["layer"]): r
        for r in rows_of("fragmented")
    }
    lines = re.findall(r"^\| ((?:as found|in pieces) \|.*) \|$", BENCHMARKS, re.M)
    assert 2 * len(lines) == len(rows)
    for line in lines:
        *case, ours, batch_norm = line.split(" | ")
        for layer, figures in ("gluon_syncbn", ours), ("BatchNorm", batch_norm):
            row = rows[(*case, layer)]
            longest = row["longest_ms_after_the_first"]
            assert figures == f"{row['median_ms']:.0f}, at most {longest:.0f}"


def in_words(text):
    return " ".join(text.split())


def test_memory_is_that_of_the_json():
    kept = {
        (row["arrangement"], row["mode"], row["variant"]): row["mxnet"]
        for row in rows_of("memory")
    }

    def less(arrangement, mode):
        fused, plain = (
            kept[f"{arrangement}-activation", mode, variant]["after_forward_mb"]
            for variant in ("fused", "BatchNorm")
        )
        return f"{100 * (1 - fused / plain):.0f} %"

    pre, post = (
        [less(name, mode) for mode in ("imperative", "static_shape")]
        for name in ("pre", "post")
    )
    text = in_words(BENCHMARKS)
    assert f"it is {pre[0]} less than with `nn.BatchNorm`" in text
    assert f"imperatively and {pre[1]} less with `static_shape`" in text
    assert f"{post[0]} and {post[1]} in a" in text


@pytest.fixture(scope="module")
def ablation():
    return results.load(RESULTS / "ablation")


def test_the_ablation_is_that_of_the_json(ablation):
    name = next(iter(ablation)).split("-")[0]
    assert results.claim(ablation, name) in in_words(README)
    assert results.summary(ablation) in README
    assert results.table(ablation) in BENCHMARKS


def test_several_devices_agree_with_one(ablation):
    (agreement,) = (run for run in ablation.values() if run["kind"] == "agreement")
    rows = [row for row in agreement["rows"] if row["dtype"] == "float64"]
    rows = [row["differences"] for row in rows if row["devices"] > 1]
    assert len(rows) == 2
    for differences in rows:
        assert max(differences[: results.AGREEING_STEPS]) < 1e-9


def test_the_cost_of_the_ablation_is_that_of_the_json(ablation):
    costs = [run for run in ablation.values() if run["kind"] == "cost"]

    def times_as_long(model, layer, other):
        """Over all cases in which both layers run."""
        (cost,) = [run for run in costs if run["model"] == model]
        times = {(r["layer"], r["batch"], r["devices"]): r for r in cost["rows"]}
        ratios = [
            row["median_ms"] / times[(other, *case)]["median_ms"]
            for (name, *case), row in times.items()
            if name == layer and "failed" not in row
        ]
        low, high = f"{min(ratios):.1f}", f"{max(ratios):.1f}"
        return (low if low == high else f"{low} to {high}") + " times"

    text = in_words(BENCHMARKS)
    fast = times_as_long("fastscnn", "syncbn", "bn")
    fcn = times_as_long("fcn", "syncbn", "bn")
    assert f"takes {fast} as long in FastSCNN, {fcn} in FCN" in text
    contrib = times_as_long("fastscnn", "contrib", "syncbn")
    assert f"contrib layer takes {contrib} as long as `SyncBatchNorm`" in text
    failed = [row for run in costs for row in run["rows"] if "failed" in row]
    assert {(row["layer"], row["devices"]) for row in failed} == {("contrib", 4)}


def test_steps_of_nets_are_those_of_the_json():
    times = {(r["net"], r["mode"], r["layer"]): r["median_ms"] for r in rows_of("net")}
    cases = {key[:2] for key in times}

    def times_as_long(layer, other):
        ratios = [times[(*case, layer)] / times[(*case, other)] for case in cases]
        return f"{min(ratios):.2f} to {max(ratios):.2f} times"

    ours = "gluon_syncbn"
    for text in in_words(README), in_words(BENCHMARKS):
        assert f"a step takes {times_as_long(ours, 'BatchNorm')} as long as" in text
        assert f"contrib layer {times_as_long('contrib', ours)} as long as" in text
    fused = times_as_long(f"{ours} fused", "BatchNorm")
    assert f"`nn.BatchNorm`, {fused} with `fuse=True`" in in_words(BENCHMARKS)


def test_medians_over_sizes_are_those_of_the_json():
    def pick(layer, place):
        return {
            (row["size"], row["batch"], row["contexts"]): row
            for row in rows_of("sizes")
            if (row["layer"], row["place"]) == (layer, place)
            and (row["dtype"], row["channels"]) == ("float32", "first")
            and row["direction"] == "both"
            and row["size"] != "tiny"
        }

    ours = pick("gluon_syncbn", "inside")
    share = statistics.median(row["share_of_copy"] for row in ours.values())

    def ratio(layer, place):
        """On one context, where all of them compute the same."""
        others = pick(layer, place)
        keys = [key for key in others if key[2] == 1]
        times = (others[key]["median_ms"] / ours[key]["median_ms"] for key in keys)
        return f"{statistics.median(times):.1f} times"

    text = in_words(BENCHMARKS)
    assert f"at {100 * share:.0f} % of the copy bandwidth" in text
    assert f"`nn.BatchNorm` took {ratio('BatchNorm', 'inside')} as long" in text
    assert f"PyTorch's `BatchNorm2d` {ratio('PyTorch', 'alone')}" in text
