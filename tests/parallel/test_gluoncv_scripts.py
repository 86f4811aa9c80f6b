"""The loop of GluonCV's segmentation script, on two CPU contexts."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from support.helpers import copy_parameters, cpus, output_of, whole

from gluon_syncbn import SyncBatchNorm, check_replicas

gluoncv = pytest.importorskip("gluoncv", reason="GluonCV is not installed")
from gluoncv import model_zoo  # noqa: E402
from gluoncv.loss import MixSoftmaxCrossEntropyLoss  # noqa: E402
from gluoncv.model_zoo import resnetv1b, segbase  # noqa: E402
from gluoncv.utils import parallel  # noqa: E402

CONTEXTS, CLASSES, SIZE = cpus(2), 4, 16


@pytest.fixture
def thin_backbone(monkeypatch):
    """A ResNet with one block in each stage."""

    def backbone(name, **options):
        return resnetv1b.ResNetV1b(resnetv1b.BottleneckV1b, [1, 1, 1, 1], **options)

    monkeypatch.setattr(segbase, "get_backbone", backbone)


def segmentation_net(norm_layer, **norm_kwargs):
    backbone = {"backbone": "resnet50", "pretrained_base": False}
    norm = {"norm_layer": norm_layer, "norm_kwargs": norm_kwargs}
    net = model_zoo.DeepLabV3(CLASSES, aux=True, crop_size=SIZE, **backbone, **norm)
    # Devices would draw other numbers.
    net.apply(lambda b: setattr(b, "_rate", 0) if type(b) is nn.Dropout else None)
    return net


def segmentation_batches(rows):
    rng = np.random.default_rng(0)
    for n in rows:
        data = mx.nd.array(rng.normal(size=(n, 3, SIZE, SIZE)), dtype="float64")
        yield data, mx.nd.array(rng.integers(0, CLASSES, (n, SIZE, SIZE)))


def train_segmentation(net, contexts, rows):
    """The script's loop; returns losses."""
    model = parallel.DataParallelModel(net, contexts, True)
    # With size_average GluonCV divides gradients by the pixels of each shard.
    criterion = MixSoftmaxCrossEntropyLoss(True, aux_weight=0.5, size_average=False)
    criterion = parallel.DataParallelCriterion(criterion, contexts, True)
    options = {"learning_rate": 0.2 / SIZE**2, "momentum": 0.9}
    parameters, kvstore = model.module.collect_params(), mx.kv.create("device")
    optimizer = gluon.Trainer(parameters, "sgd", options, kvstore=kvstore)
    found = []
    for data, target in segmentation_batches(rows):
        with autograd.record(True):
            outputs = model(data)
            losses = criterion(outputs, target)
            mx.nd.waitall()
            autograd.backward(losses)
        optimizer.step(len(data))
        found.append(whole(losses))
        mx.nd.waitall()
    return found


def test_segmentation_script(installed, thin_backbone):
    assert mx.gluon.contrib.nn.SyncBatchNorm is SyncBatchNorm
    plain = segmentation_net(nn.BatchNorm)
    ours = segmentation_net(mx.gluon.contrib.nn.SyncBatchNorm, num_devices=2)
    for net in plain, ours:
        net.initialize(force_reinit=True)
        net(mx.nd.ones((1, 3, SIZE, SIZE)))
        net.cast("float64")
    copy_parameters(plain, ours)
    # Losses tell whether parameters moved alike; cpu(1) gets no row for the second.
    rows = [3, 1, 2]
    expected = train_segmentation(plain, CONTEXTS[:1], rows)
    results = train_segmentation(ours, CONTEXTS, rows)
    for result, right in zip(results, expected):
        assert result.shape == right.shape
        np.testing.assert_allclose(result, right, rtol=1e-6)
    check_replicas(ours)

    evaluator = parallel.DataParallelModel(segbase.SegEvalModel(ours), CONTEXTS)
    ((data, target),) = segmentation_batches([3])
    outputs = [output[0] for output in evaluator(data)]
    targets = gluon.utils.split_and_load(target, CONTEXTS, even_split=False)
    assert [len(y) for y in outputs] == [len(t) for t in targets] == [2, 1]
    assert len(evaluator(data[:1])) == 1
    metric = gluoncv.utils.metrics.SegmentationMetric(CLASSES)
    metric.update(targets, outputs)
    assert 0 <= metric.get()[1] <= 1


def test_contexts_left_out_and_one_context(installed):
    x = mx.nd.ones((2, 3))
    net = gluon.nn.Dense(1)
    net.initialize()
    assert parallel.DataParallelModel(net)(x).shape == (2, 1)
    ((y,),) = parallel.DataParallelModel(net, CONTEXTS[:1])(x)
    assert y.shape == (2, 1)
    loss = gluon.loss.L2Loss()
    assert parallel.DataParallelCriterion(loss)(y, y).shape == (2,)
    (losses,) = parallel.DataParallelCriterion(loss, CONTEXTS[:1])(((y,),), y)
    assert losses.shape == (2,)


def test_gradients_that_are_added_up_stay_where_a_context_has_no_row(installed):
    net = nn.Dense(1, in_units=2)
    net.initialize(mx.init.One())
    model = parallel.DataParallelModel(net, CONTEXTS)
    net.collect_params().setattr("grad_req", "add")
    for rows in (2, 1):
        with autograd.record():
            outputs = model(mx.nd.ones((rows, 2)))
        autograd.backward([y for (y,) in outputs])
    assert [grad.asscalar() for grad in net.bias.list_grad()] == [2, 1]


def test_names_that_a_script_has_imported_are_replaced():
    output = output_of(
        "from gluoncv.utils.parallel import *\n"
        "from mxnet.gluon.contrib.nn import SyncBatchNorm\n"
        "import gluon_syncbn\n"
        "gluon_syncbn.gluoncv.install()\n"
        "print(DataParallelModel.__call__.__module__.split('.')[0],"
        " SyncBatchNorm is gluon_syncbn.SyncBatchNorm)"
    )
    assert output.split() == ["gluon_syncbn", "True"]


def test_contrib_classes_held_elsewhere_still_make_layers(installed):
    """A class's own methods find it by its name in the module that defines it."""
    held = mx.gluon.contrib.nn.basic_layers.SyncBatchNorm
    assert held is not mx.gluon.contrib.nn.SyncBatchNorm
    layer = held(in_channels=2, num_devices=1)
    layer.initialize()
    assert layer(mx.nd.ones((1, 2))).shape == (1, 2)
