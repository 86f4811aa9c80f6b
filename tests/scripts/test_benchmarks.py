"""Benchmarks and their figures end to end at tiny sizes.

That wrong results are not timed is tested in package/test_main.py. Nothing is asserted
about times: on a busy machine they mean nothing.
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


def rows_of(script, folder, *options):
    """The rows that a benchmark writes; they can be drawn."""
    output = folder / f"{script}.json"
    command = [sys.executable, SCRIPTS / f"{script}.py", *options, "--output", output]
    run_tool("env", "--unset=OMP_NUM_THREADS", *command)  # as a user calls it
    document = json.loads(output.read_text())
    assert {"processor", "cores", "mxnet", "gluon_syncbn"} <= set(document["machine"])
    run_tool(sys.executable, SCRIPTS / "plot_benchmarks.py", "--results", folder)
    assert output.with_suffix(".png").stat().st_size > 10000
    return document["rows"]


@pytest.mark.full
def test_layer(tmp_path):
    options = "--shape", "2,8,6,6", "--repetitions", 1, "--modes"
    rows = rows_of("benchmark_layer", tmp_path, *options, "static_shape", "hybridize")
    rows = [row for row in rows if row["layer"] != "PyTorch"]
    keys = "layer", "place", "mode", "contexts"
    places = {row["place"] for row in rows}
    assert places == {"inside", "convolutions", "alone"}
    assert len({tuple(row[key] for key in keys) for row in rows}) == 3 * 3 * 2 * 2
    assert all(row["repetitions"] == 1 for row in rows)


@pytest.mark.full
def test_sizes(tmp_path):
    rows = rows_of("benchmark_sizes", tmp_path, "--sizes", "tiny", "--seconds", 0.01)
    ours = [row for row in rows if row["layer"] == "gluon_syncbn"]
    keys = "dtype", "channels", "contexts"
    cases = {tuple(row[key] for key in keys) for row in ours}
    assert {("float16", "last", 1), ("float32", "first", 4)} <= cases
    assert len(ours) == len(cases) * 2 * 3  # places, directions
    assert all(row["copy_gb_s"] > 0 and row["read_gb_s"] > 0 for row in rows)
    contrib = [row for row in rows if row["layer"] == "contrib"]
    assert {(row["dtype"], row["channels"]) for row in contrib} == {
        ("float32", "first")
    }


def test_the_committed_results_can_be_drawn(tmp_path):
    """Among them PyTorch's, which is not installed for the other tests."""
    results = ROOT / "scripts" / "results"
    for path in results.glob("*.json"):
        shutil.copy(path, tmp_path)
    run_tool(sys.executable, SCRIPTS / "plot_benchmarks.py", "--results", tmp_path)
    drawn, committed = (
        {path.name for path in folder.glob("*.png")} for folder in (tmp_path, results)
    )
    assert drawn == committed


@pytest.mark.full
def test_net(tmp_path):
    pytest.importorskip("gluoncv", reason="the nets are GluonCV's")
    options = ["--nets", "FCN", "--crop", 32, "--batch", 1, "--repetitions", 1]
    rows = rows_of("benchmark_net", tmp_path, *options, "--modes", "static_shape")
    ours = "gluon_syncbn", "gluon_syncbn fused"
    assert {row["layer"] for row in rows} == {*ours, "BatchNorm", "contrib"}
    assert all((row["net"], row["contexts"]) == ("FCN", 2) for row in rows)


@pytest.mark.full
def test_memory(tmp_path):
    options = "--batch", 1, "--crop", 32, "--modes", "hybridize", "--arrangements"
    rows = rows_of("benchmark_memory", tmp_path, *options, "pre-activation")
    assert [row["variant"] for row in rows] == ["BatchNorm", "SyncBatchNorm", "fused"]
    for row in rows:
        found = row["mxnet"]
        assert found["before_mb"] > 0
        assert found["peak_mb"] >= max(*found["curve_mb"], found["after_forward_mb"])


@needs_mpi
@pytest.mark.full
def test_exchanges(tmp_path):
    program, output = SCRIPTS / "benchmark_exchange.py", tmp_path / "result.json"
    run_tool(sys.executable, program, "--repetitions", 20, "--output", output)
    result = json.loads(output.read_text())
    assert {row["processes"] for row in result["processes"]} == {1, 2, 3, 4}
