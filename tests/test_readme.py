"""The README's code runs as it stands; its figures are those of the committed JSON."""

import doctest
import json
import re
from pathlib import Path

import mxnet as mx
import pytest
from mxnet.gluon import nn

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "scripts" / "results" / "benchmark_layer.json"


def test_the_example_of_make_parallel_is_true():
    failed, tried = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert failed == 0 and tried > 15


def test_the_loop_of_ones_own_trains():
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    (code,) = (block for block in blocks if "devices.map" in block)
    code = "import mxnet as mx\nimport gluon_syncbn\n" + code
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, 3), nn.BatchNorm(), nn.Dense(3))
    batches = [(mx.nd.random.normal(shape=(5, 2, 6, 6)), mx.nd.zeros(5))] * 2
    names = {
        "net": net,
        "batches": batches,
        "loss": mx.gluon.loss.SoftmaxCrossEntropyLoss(),
    }
    exec(code, names)
    mx.nd.waitall()
    layer = net[1]
    assert layer.num_devices == 2
    assert layer.num_batches_tracked == 2
    values = [data.asnumpy() for data in layer.gamma.list_data()]
    assert (values[0] == values[1]).all()
    assert abs(values[0] - 1).max() > 0  # the trainer has moved it


@pytest.mark.parametrize("row", re.findall(r"^\| (\d) \|(.*)\|$", README, re.M))
def test_figures_are_those_of_the_json(row):
    contexts, cells = int(row[0]), [cell.strip() for cell in row[1].split("|")]
    place, mode, *figures = cells
    rows = json.loads(RESULTS.read_text())["rows"]
    for layer, figure in zip(("gluon_syncbn", "BatchNorm", "contrib"), figures):
        (match,) = (
            r
            for r in rows
            if (r["contexts"], r["place"], r["mode"], r["layer"])
            == (contexts, place, mode, layer)
        )
        assert figure == f"{match['median_ms']:.0f}"
