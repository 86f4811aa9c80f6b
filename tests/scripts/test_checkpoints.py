"""A checkpoint loads as saved or is refused in one sentence; files are whole."""

import json

import numpy as np
import pytest
from segmentation import checkpoint, files
from segmentation.config import Config
from segmentation.errors import UserError


@pytest.fixture
def state():
    parameters = {"w": np.eye(2, dtype="f4"), "b": np.ones(3, "f4")}
    momenta = {0: np.ones((2, 2), "f4"), 12: np.zeros(3, "f4")}
    config = Config.from_dict({"crop_size": 64})
    log = [{"epoch": 1, "val_loss": float("inf"), "class_iou": [0.5, None]}]
    return checkpoint.Checkpoint(config, ("a", "b"), 1, log, parameters, momenta)


@pytest.fixture
def path(tmp_path, state):
    checkpoint.save(tmp_path / "last.npz", state)
    return tmp_path / "last.npz"


def test_round_trip(path, state):
    loaded = checkpoint.load(path.parent)
    for name in "config", "classes", "epoch", "log":
        assert getattr(loaded, name) == getattr(state, name)
    for name in "parameters", "momenta":
        arrays, expected = getattr(loaded, name), getattr(state, name)
        assert arrays.keys() == expected.keys()
        for key, array in arrays.items():
            assert array.dtype == expected[key].dtype
            np.testing.assert_array_equal(array, expected[key])
    assert [item.name for item in path.parent.iterdir()] == ["last.npz"]


def with_meta(**changes):
    """Replaces parts of the settings and counts."""

    def change(path):
        with np.load(path) as file:
            arrays = dict(file)
        meta = {**json.loads(arrays["meta"].item()), **changes}
        np.savez(path, **{**arrays, "meta": np.array(json.dumps(meta))})

    return change


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-200])


@pytest.mark.parametrize(
    "change,words",
    [
        (lambda path: path.unlink(), "There is no checkpoint"),
        (lambda path: path.write_bytes(b""), "is not a whole checkpoint"),
        (lambda path: path.write_text("other"), "is not a whole checkpoint"),
        (cut_off, "is not a whole checkpoint"),
        (lambda path: np.savez(path, w=np.ones(2)), "is not a whole checkpoint"),
        (lambda path: np.savez(path, meta=np.array([{}])), "allow_pickle=False"),
        (with_meta(format="other"), "is wrong: its format is 'other'"),
        (with_meta(config={"lr": -1.0}), "is wrong: --lr is -1.0, but must be"),
        (with_meta(config={"color": 1}), "is wrong: The setting 'color' is unknown"),
    ],
)
def test_a_wrong_file_is_one_sentence(path, change, words):
    change(path)
    with pytest.raises(UserError) as caught:
        checkpoint.load(path)
    text = str(caught.value)
    assert str(path) in text and words in text and text.endswith(".")


def test_a_file_that_cannot_be_written_stays_what_it_was(tmp_path):
    path = tmp_path / "last.npz"
    path.write_bytes(b"before")
    words = "last.npz cannot be written: No space left on"
    with pytest.raises(UserError, match=words), files.replacing(path) as file:
        file.write(b"af")
        raise OSError(28, "No space left on device")
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
