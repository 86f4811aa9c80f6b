"""The benchmarks and the ablation run end to end with tiny sizes."""

import json
import sys

import pytest
import tables
from support.helpers import ROOT, run_tool

SCRIPTS = ROOT / "scripts" / "benchmarks"


@pytest.mark.full
@pytest.mark.timeout(280)
@pytest.mark.parametrize("name", ["layer", "memory", "net"])
def test_a_benchmark_writes_what_tables_read(name, tmp_path):
    if name == "net":
        pytest.importorskip("gluoncv", reason="the nets are GluonCV's")
    command = sys.executable, SCRIPTS / f"benchmark_{name}.py", "--quick"
    output = run_tool(*command, "--output", tmp_path / "rows.json")
    assert "GB/s" in tables.machine(tmp_path / "rows.json")
    rows = tables.read(tmp_path / "rows.json")["rows"]
    if name == "layer":
        assert len(rows) == 48
        assert tables.layer(tmp_path / "rows.json").count("\n") == 18
    elif name == "memory":
        assert all(r["peak_mb"] >= r["after_forward_mb"] > 0 for r in rows)
    else:
        assert [row["workers"] for row in rows] == ["default"] * 4 + ["2"] * 4
        assert [row["update"] for row in rows] == [False, False, True, True] * 2
        times = [row["median_ms"] for row in rows]
        ours, ours_with_update, _, contrib_with_update = (
            f"{time / base:.2f}" for time, base in zip(times[::2], times[1::2])
        )
        assert f"| {ours} | {ours_with_update} | {contrib_with_update} |" in output


def test_what_is_wrong_is_not_timed(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import benchmark_layer

    layers = benchmark_layer.LAYERS
    monkeypatch.setitem(layers, "gluon_syncbn", layers["BatchNorm"])
    with pytest.raises(SystemExit, match="gluon_syncbn: errors must be below"):
        benchmark_layer.measure(2, (4, 3, 5, 5), 1)


@pytest.mark.full
@pytest.mark.timeout(280)
def test_a_run_of_the_ablation_is_repeated(tmp_path):
    pytest.importorskip("gluoncv", reason="the ablation trains GluonCV's nets")
    camvid = ROOT / ".." / "shared" / "data" / "camvid"
    if not camvid.exists():
        pytest.skip("CamVid is not in ../shared/data/camvid")
    options = "--norm bn --crop-size 64 --epochs 1 --images 8".split()
    program = sys.executable, ROOT / "scripts/ablation.py", "--data-root", camvid
    output = run_tool(*program, *options, "--results", tmp_path)
    assert "| fastscnn | 2 | 1 | bn | 1 |" in output
    run = json.loads((tmp_path / "camvid-fastscnn-bn-2x1-seed0.json").read_text())
    assert len(run["epochs"]) == 1 and len(run["classes"]) == 11
    # Running, batch and recomputed statistics differ, so their scores differ.
    scores = {scores["mean_iou"] for scores in run["test"].values()}
    assert len(scores) == 3 and all(0 <= score <= 1 for score in scores)
