"""The benchmarks and their figures, end to end in a tiny size.

Nothing is asserted about times: on a busy machine they mean nothing.
"""

import json
import sys

import pytest
from support.helpers import ROOT, run_tool

pytest.importorskip("matplotlib", reason="figures need matplotlib")

SCRIPTS = ROOT / "scripts" / "benchmarks"
RESULTS = ROOT / "scripts" / "results"
TINY = {
    "layer": ["--shape", "2,8,6,6", "--repetitions", 1],
    "net": "--nets FCN --crop 32 --batch 1 --repetitions 1 --modes hybridize".split(),
    "memory": ["--batch", 1, "--crop", 32, "--modes", "hybridize"],
}


@pytest.mark.full
@pytest.mark.timeout(280)
@pytest.mark.parametrize("name", TINY)
def test_a_benchmark_writes_what_tables_and_figures_read(name, tmp_path):
    if name == "net":
        pytest.importorskip("gluoncv", reason="the nets are GluonCV's")
    output = tmp_path / f"benchmark_{name}.json"
    command = sys.executable, SCRIPTS / f"benchmark_{name}.py", *TINY[name]
    run_tool("env", "--unset=OMP_NUM_THREADS", *command, "--output", output)
    found, committed = (
        json.loads(path.read_text()) for path in (output, RESULTS / output.name)
    )
    assert found["machine"].keys() <= committed["machine"].keys()
    assert found["rows"][0].keys() == committed["rows"][0].keys()
    if name == "memory":
        assert all(r["peak_mb"] >= r["after_forward_mb"] > 0 for r in found["rows"])
    run_tool(sys.executable, SCRIPTS / "benchmarking.py", tmp_path)
    assert output.with_suffix(".png").stat().st_size > 10000
