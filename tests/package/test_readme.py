"""The README's code runs; its figures, as the benchmarks' page's, are the JSON's."""

import json
import re

import pytest
from ablation import load, summary, table
from support.helpers import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
RESULTS = ROOT / "scripts" / "results"
OURS = "gluon_syncbn"


def rows_of(benchmark):
    return json.loads(
        (RESULTS / f"benchmark_{benchmark}.json").read_text(encoding="utf-8")
    )["rows"]


def by(rows, *keys, figure="median_ms"):
    """This figure of each row that has it, by the row's values of these keys."""
    return {tuple(row[k] for k in keys): row[figure] for row in rows if figure in row}


def times_as_long(times, layer, net):
    """The range over modes of a net's step as a multiple of that with nn.BatchNorm."""
    keys = [key for key in times if key[:2] == (layer, net)]
    ratios = [times[key] / times[("BatchNorm", *key[1:])] for key in keys]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def assert_says(page, *sentences):
    text = " ".join(page.split())
    for sentence in sentences:
        assert " ".join(sentence.split()) in text


def test_the_programs_train(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first, quick_start = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(first, {})
    exec(quick_start, {})
    assert float(capsys.readouterr().out.split()[-1]) > 0.9


def test_the_layer():
    times = by(rows_of("layer"), "contexts", "place", "mode", "layer")
    lines = re.findall(r"^\| (\d) \|(.*)\|$", BENCHMARKS, re.M)
    assert len(lines) == 16
    for contexts, cells in lines:
        place, mode, *figures = (cell.strip() for cell in cells.split("|"))
        for layer, figure in zip((OURS, "BatchNorm", "contrib"), figures):
            assert figure == f"{times[int(contexts), place, mode, layer]:.0f}"


def test_steps_of_nets():
    times = by(rows_of("net"), "layer", "net", "mode")
    for page, layers in (
        (README, (OURS, "contrib")),
        (BENCHMARKS, (OURS, f"{OURS} fused", "contrib")),
    ):
        for net in "FastSCNN", "FCN", "DeepLabV3":
            cells = [times_as_long(times, layer, net) for layer in layers]
            assert_says(page, f"| {net} | {' | '.join(cells)} |")


@pytest.fixture(scope="module")
def ablation():
    return load()


def test_the_ablation(ablation):
    for page, found in ((README, summary(ablation)), (BENCHMARKS, table(ablation))):
        for line in found.splitlines():
            assert line in page or set(line) == set("| -")
