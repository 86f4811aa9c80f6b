"""Benchmarks and their figures end to end at tiny sizes.

Nothing is asserted about times: on a busy machine they mean nothing.
"""

import json
import shutil
import sys

import pytest
from support.helpers import ROOT, run_tool
from support.mpi import needs_mpi

pytest.importorskip("matplotlib", reason="figures need matplotlib")
pytestmark = pytest.mark.timeout(280)

SCRIPTS = ROOT / "scripts" / "benchmarks"
RESULTS = ROOT / "scripts" / "results"
KEYS = {
    "layer": ("layer", "place", "mode", "contexts"),
    "net": ("net", "layer"),
    "memory": ("arrangement", "variant"),
    "exchange": ("kind", "processes", "kilobytes"),
}
TINY = {
    "layer": ["--shape", "2,8,6,6", "--repetitions", 1],
    "net": "--nets FCN --crop 32 --batch 1 --repetitions 1 --modes hybridize".split(),
    "memory": ["--batch", 1, "--crop", 32, "--modes", "hybridize"],
    "exchange": ["--repetitions", 20],
}


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["layer", "net", "memory", pytest.param("exchange", marks=needs_mpi)]
)
def test_the_cases_are_the_committed_ones(name, tmp_path):
    if name == "net":
        pytest.importorskip("gluoncv", reason="the nets are GluonCV's")
    output = tmp_path / f"benchmark_{name}.json"
    script = SCRIPTS / f"benchmark_{name}.py"
    command = [sys.executable, script, *TINY[name], "--output", output]
    run_tool("env", "--unset=OMP_NUM_THREADS", *command)  # as a user calls it
    found, committed = (
        json.loads(path.read_text()) for path in (output, RESULTS / output.name)
    )
    assert found["machine"].keys() <= committed["machine"].keys()
    cases, expected = (
        {tuple(row[key] for key in KEYS[name]) for row in document["rows"]}
        for document in (found, committed)
    )
    assert cases == {case for case in expected if name != "net" or case[0] == "FCN"}
    assert found["rows"][0].keys() == committed["rows"][0].keys()
    if name == "memory":
        assert all(r["peak_mb"] >= r["after_forward_mb"] > 0 for r in found["rows"])
    run_tool(sys.executable, SCRIPTS / "plot_benchmarks.py", "--results", tmp_path)
    assert output.with_suffix(".png").stat().st_size > 10000


def test_the_committed_results_can_be_drawn(tmp_path):
    for path in RESULTS.glob("*.json"):
        shutil.copy(path, tmp_path)
    run_tool(sys.executable, SCRIPTS / "plot_benchmarks.py", "--results", tmp_path)
    drawn, committed = (
        {path.name for path in folder.glob("*.png")} for folder in (tmp_path, RESULTS)
    )
    assert drawn == committed


def test_a_step_in_the_profiler_can_be_drawn(tmp_path):
    picture = tmp_path / "trace.png"
    run_tool(sys.executable, ROOT / "scripts" / "draw_trace.py", picture)
    assert picture.stat().st_size > 10000


def test_what_is_wrong_is_not_timed(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import benchmark_layer

    layers = benchmark_layer.LAYERS
    monkeypatch.setitem(layers, "gluon_syncbn", layers["BatchNorm"])
    with pytest.raises(SystemExit, match="gluon_syncbn on 2 contexts differs"):
        benchmark_layer.measure((4, 3, 5, 5), 2, ["hybridize"], 1)
