"""The ablation end to end at a tiny size."""

import json
import sys

import pytest
from support.helpers import ROOT, run_tool

pytest.importorskip("gluoncv", reason="the ablation trains GluonCV's nets")


@pytest.mark.full
@pytest.mark.timeout(280)
def test_a_quick_grid_is_made_once_and_drawn(tmp_path):
    command = sys.executable, ROOT / "scripts/ablation.py", "--quick"
    first = run_tool(*command, "--results", tmp_path)
    paths = sorted(tmp_path.glob("*.json"))
    names = [f"digits-fastscnn-{arm}-seed0" for arm in ("bn-2x1", "syncbn-1x2")]
    assert [path.stem for path in paths] == [*names, "digits-fastscnn-syncbn-2x1-seed0"]
    for path in paths:
        run = json.loads(path.read_text())
        assert [entry["epoch"] for entry in run["epochs"]] == [1]
        assert run["settings"]["lr"] == 0.025 and run["diverged"] is None
        assert len(run["predictions"]) == run["test_images"] == 4
        scores = [run["test"][kind]["mean_iou"] for kind in run["test"]]
        # Statistics of the batch and recomputed ones are other functions of the images.
        assert len(set(scores)) == 3 and all(0 <= score <= 1 for score in scores)
    assert (tmp_path / "ablation.png").stat().st_size > 20000
    second = run_tool(*command, "--results", tmp_path)
    assert second == first[first.index("| net |") :]
