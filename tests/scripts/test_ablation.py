"""The ablation end to end at a tiny size, and its parts by themselves."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.helpers import PATH, ROOT

pytest.importorskip("gluoncv", reason="the ablation trains GluonCV's nets")
from ablation import figures, one_run, plan, results
from ablation.jobs import left_over
from ablation.process import make_engine
from segmentation import checkpoint
from segmentation.config import Config
from segmentation.data import Batches, open_split
from segmentation.devices import open_contexts
from segmentation.errors import UserError
from segmentation.models import build_model, parameters

pytestmark = pytest.mark.timeout(280)

# The script with a tiny grid for its quick one.
PROGRAM = """
import runpy, sys
from ablation import plan
plan.QUICK["fastscnn"] = plan.Scale("fastscnn", 64, 2, (2,), (1,), 1, 6, 4)
sys.argv[0] = {script!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start(folder):
    program = PROGRAM.format(script=str(ROOT / "scripts/ablation.py"))
    options = "--quick", "--runs", "runs", "--jobs", "2", "--parts", "fastscnn"
    return subprocess.Popen(
        [sys.executable, "-c", program, *options],
        cwd=folder, text=True, env={**os.environ, "PYTHONPATH": PATH},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process, status=0):
    output, errors = process.communicate(timeout=240)
    assert process.returncode == status, output + errors[-2000:]
    return output if status == 0 else errors


# ---------------------------------------------------------------- end to end


@pytest.mark.full
def test_a_grid_that_was_interrupted_is_continued_and_drawn(tmp_path):
    process = start(tmp_path)
    logs = tmp_path / "runs"
    while not list(logs.glob("*/log.json")):  # the first epoch of a run
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert "interrupted" in finish(process, 130)
    done = len(list(logs.glob("results/*.json")))
    assert done < 3
    output = finish(start(tmp_path))
    assert f"{3 - done} to do\n" in output
    assert "0 to do\n" in finish(start(tmp_path))
    found = results.load(logs / "results")
    names = [f"digits-fastscnn-{arm}-seed0" for arm in ("bn-2x1", "syncbn-1x2")]
    assert list(found) == [*names, "digits-fastscnn-syncbn-2x1-seed0"]
    for run in found.values():
        assert [entry["epoch"] for entry in run["epochs"]] == [1, 2]
        assert run["settings"]["lr"] == 0.025 and run["diverged"] is None
        assert len(run["predictions"]) == run["test_images"] == 4
        for kind in results.SCORES:
            assert 0 <= run["test"][kind]["mean_iou"] <= 1
    for name in "ablation.png", "ablation_details.png":
        assert (logs / "results" / name).stat().st_size > 20000
    lines = [line for line in output.splitlines() if line.startswith("| fastscnn")]
    assert len(lines) == 3


@pytest.mark.full
def test_several_devices_agree_with_one(tmp_path):
    """The task's own process trains each net for a step."""
    scale = plan.Scale("fastscnn", 64, train_images=8, eval_images=4)
    task = digits(tmp_path).agreement(scale, short=2, epochs=1, devices=(2,))
    document = carried_out(task)
    rows = {(r["dtype"], r["devices"], r["noise"]): r for r in document["rows"]}
    assert len(rows) == 6
    assert max(rows["float64", 2, 0.0]["differences"]) < 1e-9
    assert max(rows["float64", 1, 1e-7]["differences"]) > 1e-9
    assert len(rows["float32", 2, 0.0]["losses"]) == 1


@pytest.mark.full
def test_a_run_that_diverges_has_a_result(tmp_path):
    scale = plan.Scale("fastscnn", 64, 2, (2,), (1,), 1, 16, 4)
    task = digits(tmp_path).grid(scale)[0]
    task["settings"].update(lr=1e6, warmup_epochs=0, weight_decay=1e6)
    run = carried_out(task)
    assert run["diverged"].startswith("The loss is not a number in epoch 1")
    assert "test" not in run and results.score(run) == 0


def digits(folder):
    return plan.Plan({"dataset": "digits"}, folder, folder)


def carried_out(task):
    subprocess.run(
        [sys.executable, "-m", f"ablation.{task['module']}", json.dumps(task)],
        env={**os.environ, "PYTHONPATH": PATH}, check=True, timeout=240,
    )  # fmt: skip
    return json.loads(Path(task["result"]).read_text())


# ---------------------------------------------------------------- what arms share


def test_all_arms_of_a_seed_begin_alike_and_see_the_same_images():
    scale = plan.Scale("fastscnn", 64, 1, (2,), (1, 2), 1, 8, 4)
    seen, initial = [], []
    for arm in plan.arms(scale):
        config = plan.settings(scale, arm, 3, {"dataset": "digits"})
        assert config.lr == pytest.approx(arm.batch * 0.0125)
        batches = Batches(open_split("train", config), config, training=True)
        xs, ys = zip(*batches.epoch(0))
        assert {len(x) for x in xs} == {arm.batch}
        seen.append([np.concatenate(xs), np.concatenate(ys)])
        contexts = open_contexts("cpu", arm.devices)
        initial.append(parameters(build_model(config, 11, contexts)))
    for values, (x, y) in zip(initial, seen):
        np.testing.assert_array_equal(x, seen[0][0])
        np.testing.assert_array_equal(y, seen[0][1])
        for name, value in values.items():
            np.testing.assert_array_equal(value, initial[0][name], err_msg=name)
    other = plan.settings(scale, plan.arms(scale)[0], 4, {"dataset": "digits"})
    other = parameters(build_model(other, 11, open_contexts("cpu", 1)))
    assert any((value != initial[0][name]).any() for name, value in other.items())


def test_batch_statistics_are_of_the_devices_that_synchronize():
    """Over a whole batch if synchronized, else each device's own; without Dropout."""

    def scores(norm, devices):
        settings = {"crop_size": 64, "val_images": 4, "batch_size": 4}
        config = Config.from_dict({**settings, "norm": norm, "num_devices": devices})
        engine, batches = make_engine(config, open_split("test", config), False)
        found = [one_run.scores(engine, batches) for _ in range(2)]
        return found[0]["running"]["loss"], [each["batch"]["loss"] for each in found]

    (running, one), (same, two), (_, apart) = (
        scores(*arm) for arm in (("syncbn", 1), ("syncbn", 2), ("bn", 4))
    )
    assert one[0] == one[1] and abs(running / one[0] - 1) > 1e-3
    assert running == pytest.approx(same, rel=1e-5)
    assert one == pytest.approx(two, rel=1e-4)
    assert abs(apart[0] / one[0] - 1) > 1e-3


def test_recomputed_statistics_are_of_the_weights_alone():
    """Whatever norm they were trained with, and on how many devices."""
    settings = {"crop_size": 64, "train_images": 6, "val_images": 4, "batch_size": 2}
    found, weights = [], None
    for norm, devices in ("bn", 2), ("syncbn", 1):
        config = Config.from_dict({**settings, "norm": norm, "num_devices": devices})
        test_set = open_split("test", config)
        engine, batches = make_engine(config, test_set, False, weights)
        weights = weights or parameters(engine.net)
        state = checkpoint.Checkpoint(config, test_set.classes, 1, [], weights)
        before = one_run.scores(engine, batches)["running"]["loss"]
        found.append(one_run.recomputed(state, batches)["loss"])
        assert abs(found[-1] / before - 1) > 1e-3
    assert found[0] == pytest.approx(found[1], rel=1e-6)


# ---------------------------------------------------------------- plans and tables


def test_the_full_grid_has_every_arm_and_whole_seeds():
    tasks = digits(Path("runs")).grid(plan.FULL["fastscnn"])
    keys = "norm", "devices", "images", "seed"
    arms = {tuple(task["about"][k] for k in keys) for task in tasks}
    several = set(itertools.product(("bn", "syncbn"), (2, 4), (1, 2, 4), range(3)))
    assert arms == several | set(
        itertools.product(["syncbn"], [1], (2, 4, 8, 16), range(3))
    )
    assert len({task["name"] for task in tasks}) == len(tasks) == len(arms)
    seeds = [task["about"]["seed"] for task in tasks]
    assert seeds == sorted(seeds)  # cut short, the grid has whole seeds


def test_a_result_of_other_settings_is_refused(tmp_path):
    """One that lacks a score is made again; a run that diverged has none."""
    first, second, *rest = digits(tmp_path).grid(plan.QUICK["fastscnn"])
    Path(first["result"]).write_text(json.dumps({"settings": first["compared"]}))
    found = {"settings": second["compared"], "test": {"running": {}, "batch": {}}}
    Path(second["result"]).write_text(json.dumps(found))
    assert left_over([first, second, *rest]) == [second, *rest]
    found["test"]["recomputed"] = {}
    Path(second["result"]).write_text(json.dumps(found))
    assert left_over([first, second, *rest]) == rest
    Path(rest[0]["result"]).write_text(json.dumps({"settings": {}}))
    with pytest.raises(UserError, match="result of other settings"):
        left_over([first, *rest])


def a_run(norm, devices, images, seed, score, model="fastscnn"):
    scores = {"loss": 1.0, "pixel_accuracy": 0.5, "mean_iou": score}
    scores["class_iou"] = [score, None]
    epoch = {"epoch": 1, "mean_iou": score, "val_loss": None}
    return {
        "kind": "run", "model": model, "norm": norm, "devices": devices,
        "images": images, "seed": seed, "settings": {"crop_size": 64, "epochs": 1},
        "train_images": 4, "test_images": 4, "epochs": [epoch], "classes": ["a", "b"],
        "test": {"running": scores, "batch": {**scores, "mean_iou": score / 2}},
    }  # fmt: skip


def test_the_table_by_hand():
    runs = [a_run("bn", 2, 1, seed, score) for seed, score in enumerate((0.1, 0.3))]
    runs += [a_run("syncbn", 2, 1, 0, 0.25), a_run("bn", 2, 1, 0, 0.5, "fcn")]
    found = {str(k): run for k, run in enumerate(runs)}
    table = results.table(found)
    assert "| mIoU | with batch statistics | pixel accuracy |" in table
    assert table.splitlines()[2:] == [
        "| fastscnn | 2 | 1 | bn | 2 | 0.200\xa0±\xa00.141 | 0.100\xa0±\xa00.071 "
        "| 0.500\xa0±\xa00.000 |",
        "| fastscnn | 2 | 1 | syncbn | 1 | 0.250 | 0.125 | 0.500 |",
        "| fcn | 2 | 1 | bn | 1 | 0.500 | 0.250 | 0.500 |",
    ]


def test_recomputed_statistics_are_told_where_there_are_any():
    runs = [a_run("bn", 2, 1, seed, 0.1) for seed in range(2)]
    runs[0]["test"]["recomputed"] = runs[1]["test"]["batch"]
    found = {str(k): run for k, run in enumerate(runs)}
    both = "0.050\xa0±\xa00.000"
    assert f"| 0.050 | {both} |" in results.table(found)
    assert results.summary(found).splitlines()[2].endswith("| 0.050 |  |")


@pytest.mark.parametrize("model", ["fastscnn", "fcn"])
def test_what_there_is_is_drawn(model, tmp_path):
    gone = a_run("bn", 2, 1, 0, 0.1, model)  # it diverged
    for key in "test", "epochs", "classes":
        gone.pop(key)
    assert results.score(gone) == 0
    run = a_run("syncbn", 2, 1, 0, 0.2, model)
    run["test"]["recomputed"] = run["test"]["running"]
    found = {"digits-a": gone, "digits-b": run}
    paths = figures.draw(found, tmp_path)
    names = {path.name for path in paths}
    assert names >= {"ablation_details.png", "ablation_details_narrow.png"}
    assert all(path.exists() for path in paths)
