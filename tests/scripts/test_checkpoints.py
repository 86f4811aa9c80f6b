"""A checkpoint from anywhere loads as it was saved, or is refused in one sentence."""

import json
import random
import string
import tracemalloc
import zipfile

import numpy as np
import pytest
from segmentation import checkpoint
from segmentation.errors import UserError
from support.checkpoints import (
    a_checkpoint,
    members,
    meta_of,
    npy,
    rewrite,
    write_members,
)


@pytest.fixture
def path(tmp_path):
    checkpoint.save(tmp_path / "last.npz", a_checkpoint())
    return tmp_path / "last.npz"


def assert_equal(one, two):
    assert repr((one.config, one.classes, one.epoch, one.log)) == repr(
        (two.config, two.classes, two.epoch, two.log)
    )
    for mine, other in (one.parameters, two.parameters), (one.momenta, two.momenta):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            assert value.dtype == other[name].dtype
            np.testing.assert_array_equal(value, other[name])


def refusal(path):
    with pytest.raises(UserError) as caught:
        checkpoint.load(path)
    text = str(caught.value)
    assert text.endswith(".") and str(path) in text and len(text) < len(str(path)) + 700
    return text


def test_round_trip(path):
    assert_equal(checkpoint.load(path.parent), a_checkpoint())
    assert [item.name for item in path.parent.iterdir()] == ["last.npz"]


def test_a_missing_one_is_one_sentence(tmp_path):
    assert refusal(tmp_path / "last.npz").startswith("There is no checkpoint")
    assert "too long" in refusal(tmp_path / ("x" * 300))
    assert "regular file" in refusal("/dev/zero")


# ---------------------------------------------------------------- the schema


def put(*keys_and_value):
    """A change that sets one value somewhere inside."""
    *keys, value = keys_and_value

    def change(meta):
        for key in keys[:-1]:
            meta = meta[key]
        meta[keys[-1]] = value

    return change


def by_words(value):
    """A case is named by the words that it expects."""
    return value if isinstance(value, str) else "-"


def without(key):
    return lambda meta: meta.pop(key) and None


@pytest.mark.parametrize(
    "change,words",
    [
        (put("classes", 5), "'classes' is 5, but must be a list of 2 to"),
        (put("classes", []), "'classes' is []"),
        (put("classes", ["a"]), "'classes' is ['a']"),
        (put("classes", ["a", 1]), "'classes' is ['a', 1]"),
        (put("classes", ["a", "\ud800"]), "printable names"),
        (put("classes", ["a"] * 5000), "a list of 2 to 4096"),
        (put("config", 5), "settings are 5"),
        (put("config", []), "settings are []"),
        (put("config", "color", 1), "setting 'color' is unknown"),
        (put("config", "model", "../../x"), "--model is '../../x', but must be one of"),
        (put("config", "model", ["fcn"]), "of type str"),
        (put("config", "crop_size", float("nan")), "of type int"),
        (put("config", "crop_size", 2**50), "from 32 to 8192"),
        (put("config", "num_devices", 10**9), "from 1 to 1024"),
        (put("config", "lr", float("inf")), "--lr is inf"),
        (put("config", "hybridize", 1), "of type bool"),
        (put("config", "epochs", True), "of type int"),
        (put("config", "data_root", "x"), "--data-root has no use"),
        (lambda meta: meta["config"].pop("lr") and None, "missing settings is ['lr']"),
        (put("epoch", -5), "'epoch' is -5"),
        (put("epoch", 0), "'epoch' is 0"),
        (put("epoch", 2.0), "'epoch' is 2.0"),
        (put("epoch", 13), "from 1 to the 12"),
        (put("epoch", None), "'epoch' is None"),
        (without("epoch"), "list of its parts is ['classes', 'config', 'format', 'lo"),
        (put("extra", 1), "list of its parts"),
        (put("format", "other"), "its format is 'other'"),
        (without("format"), "'meta' cannot be read"),
        (lambda meta: [meta], "'meta' cannot be read"),
        (put("log", {}), "'log' is {}"),
        (put("log", []), "a list of 2 entries"),
        (put("log", 1, 5), "entry 2 of 'log' is 5"),
        (put("log", 1, "epoch", 1), "'epoch' of entry 2 of 'log' is 1"),
        (put("log", 0, "mean_iou", "x"), "'mean_iou' of entry 1 of 'log' is 'x'"),
        (put("log", 0, "mean_iou", float("nan")), "from 0 to 1"),
        (put("log", 0, "seconds", 10**400), "from 0 to 1e15"),
        (put("log", 0, "waits", "data", None), "a table of 3 numbers"),
        (put("log", 0, "class_iou", [0.5]), "a list of 2 numbers"),
    ],
    ids=by_words,
)
def test_a_wrong_value_is_one_sentence(path, change, words):
    rewrite(path, change)
    assert words in refusal(path)


HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }"


def with_header(old, new):
    """The array w with a header that says something else."""
    data = npy(np.eye(2, dtype="f4"))
    header = HEADER.replace(old, new).encode()
    header = header.ljust(len(data) - 16 - 10 - 1) + b"\n"
    return data[:8] + len(header).to_bytes(2, "little") + header + data[-16:]


@pytest.mark.parametrize(
    "name,data,words",
    [
        ("parameter:w.npy", with_header("(2, 2)", f"({10**13},)"), "(10000000000000,)"),
        ("parameter:w.npy", with_header("(2, 2)", "(-2, -2)"), "not understood"),
        ("parameter:w.npy", with_header("(2, 2)", "(2, 3)"), "16 bytes, not those"),
        ("parameter:w.npy", with_header("(2, 2)", "(2, 2" + ", 1" * 9 + ")"), "dimens"),
        ("parameter:w.npy", with_header("<f4", "|O8"), "pickled"),
        ("parameter:w.npy", with_header("<f4", "<q7"), "of an unknown type"),
        ("parameter:w.npy", with_header("False", "__import__('os')"), "understood"),
        ("parameter:w.npy", npy(np.ones(2, "c8")), "is 'complex64', but must be float"),
        ("parameter:w.npy", npy(np.ones(2, ">f4")), "is '>f4', but must be float"),
        ("parameter:w.npy", npy(np.ones(2, "i8")), "is 'int64'"),
        ("parameter:w.npy", npy(np.ones(0, "f4")), "0 bytes"),
        ("parameter:w.npy", npy(np.array([{}, 1])), "pickled"),
        ("parameter:w.npy", npy(np.ones(2, "f4,i4")), "not understood"),
        ("parameter:w.npy", b"", "not understood"),
        ("momentum:abc.npy", npy(np.ones(2, "f4")), "'momentum:abc', but must be"),
        ("momentum:-1.npy", npy(np.ones(2, "f4")), "'momentum:-1'"),
        ("momentum:012.npy", npy(np.ones(2, "f4")), "'momentum:012'"),
        ("gamma.npy", npy(np.ones(2, "f4")), "name of an array is 'gamma'"),
        ("run.sh", b"x", "not stored .npy arrays"),
        ("meta.npy", npy(np.array(["{}", "{}"])), "'meta' cannot be read"),
        ("meta.npy", npy(np.array("[" * 10**5)), "'meta' cannot be read"),
        ("meta.npy", npy(np.array(5)), "'meta' cannot be read"),
    ],
    ids=by_words,
)
def test_a_wrong_array_is_one_sentence(path, name, data, words):
    write_members(path, {**members(path), name: data})
    assert words in refusal(path)


def test_a_wrong_archive_is_one_sentence(path):
    whole, content = path.read_bytes(), members(path)
    for data in b"", b"no zip", whole[:-200], whole[: len(whole) // 2], whole[5:]:
        path.write_bytes(data)
        assert "cut off or altered" in refusal(path)
    content.pop("meta.npy")
    write_members(path, content)
    assert "'meta' cannot be read" in refusal(path)
    with pytest.warns(UserWarning, match="Duplicate name"):
        write_members(path, [*content.items(), *content.items()])
    assert "two arrays of one name" in refusal(path)


def test_nothing_large_is_allocated_for_a_small_file(path):
    """Compressed zeros, and sizes that a header only claims."""
    bomb = path.with_name("bomb.npz")
    content = {**members(path), "parameter:w.npy": npy(np.zeros((2**12, 2**12), "f4"))}
    write_members(bomb, content, zipfile.ZIP_DEFLATED)
    content["parameter:w.npy"] = with_header("(2, 2)", f"({10**13},)")
    write_members(path, content)
    for file in bomb, path:
        tracemalloc.start()
        refusal(file)
        assert tracemalloc.get_traced_memory()[1] < 2**20
        tracemalloc.stop()


# ---------------------------------------------------------------- seeded mutations

JUNK = [
    None, True, -1, 0, 5, 2**63, 10**400, 0.5, float("nan"), float("-inf"), "", "x",
    "../../x", "\0", "\ud800", [], [0], {}, {"a": 1}, [[[]]], "9" * 3000,
]  # fmt: skip


def places(value, found):
    """Every (container, key) inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        found.append((value, key))
        if isinstance(inner, (dict, list)):
            places(inner, found)
    return found


def mutate_values(rng, path, target):
    def change(meta):
        for _ in range(rng.choice((1, 1, 2))):
            container, key = rng.choice(places(meta, []))
            if rng.random() < 0.2:
                del container[key]
            else:
                container[key] = rng.choice(JUNK)

    rewrite(path, change, target)


def mutate_bytes(rng, data):
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at, length = rng.randrange(len(data) + 1), rng.choice((1, 2, 4, 30, 300))
        piece = data[at : at + length]
        new = rng.choice(
            (b"", piece * 2, piece[::-1], rng.randbytes(len(piece)), b"\xff" * length)
        )
        data[at : at + length] = new
    return bytes(data)


def mutate_header(rng, path, target):
    """Changes the first bytes of one array, under a right checksum."""
    content = members(path)
    name = rng.choice(sorted(content))
    head = bytearray(content[name][:80])
    for _ in range(rng.choice((1, 2))):
        head[rng.randrange(80)] = ord(rng.choice(string.digits + "<>|OUfci(,)' {}\n"))
    write_members(target, {**content, name: bytes(head) + content[name][80:]})


def load_and_measure(target):
    """The state or else the error, and the most bytes that were in use at once."""
    tracemalloc.reset_peak()
    before, state, error = tracemalloc.get_traced_memory()[0], None, None
    try:
        state = checkpoint.load(target)
    except UserError as raised:
        error = raised
    return state, error, tracemalloc.get_traced_memory()[1] - before


def test_thousands_of_mutations_load_equal_or_are_one_sentence(path):
    rng, target = random.Random(0), path.with_name("mutant.npz")
    whole, results = path.read_bytes(), {"loaded": 0, "refused": 0}
    tracemalloc.start()
    for number in range(3000):
        if number % 3 == 0:
            target.write_bytes(mutate_bytes(rng, whole))
        else:
            (mutate_values, mutate_header)[number % 3 - 1](rng, path, target)
        state, error, allocated = load_and_measure(target)
        if allocated >= 2**20:
            # Python's table of interned strings grows in one piece, of 3.9 MB in a
            # process with many modules: once, and not the next time.
            allocated = load_and_measure(target)[2]
        assert allocated < 2**20, number
        if error is None:
            results["loaded"] += 1
            assert_says_the_same(state, target, path, number % 3)
        else:
            results["refused"] += 1
            assert str(error).endswith(".") and str(error).isprintable()
    tracemalloc.stop()
    assert min(results.values()) > 50, results


def assert_says_the_same(state, target, original, kind):
    """Loaded values are those saved or, where changed, those of the file."""
    if kind == 0:
        assert_equal(state, a_checkpoint())
        return
    copy = original.with_name("copy.npz")
    checkpoint.save(copy, state)
    assert_equal(checkpoint.load(copy), state)
    said, written = meta_of(target), meta_of(copy)
    for meta in said, written:
        meta["config"].pop("run_dir")  # filled in where it is empty
    assert json.dumps(written) == json.dumps(said)
