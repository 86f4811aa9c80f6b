"""The loops of GluonCV's scripts on two CPU contexts, after `install`."""

import json
import sys
from types import ModuleType

import gluon_syncbn

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import loss, nn
from support.helpers import copy_parameters, cpus, whole

gluoncv = pytest.importorskip("gluoncv", reason="GluonCV is not installed")
nets = pytest.importorskip("support.detection_nets", reason="GluonCV is not installed")
parallel = gluoncv.utils.parallel
CONTEXTS, SIZE = cpus(2), 64


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    rcnn = gluoncv.model_zoo.rcnn
    owners = mx.gluon.contrib.nn, mx.gluon.Block, parallel, parallel.Parallel
    owners += mx.nd.contrib, mx.sym.contrib, gluoncv.nn.feature.FPNFeatureExpander
    owners += rcnn.faster_rcnn.predefined_models, rcnn.mask_rcnn.predefined_models
    former = [dict(vars(owner)) for owner in owners]
    gluon_syncbn.gluoncv.install()
    gluon_syncbn.gluoncv.install()
    get_ident = parallel.threading.get_ident
    assert parallel.parallel_apply(get_ident, [()], None, True) == (get_ident(),)
    late = ModuleType("gluoncv.late")  # as one that is imported after install
    late.SyncBatchNorm = mx.gluon.contrib.nn.SyncBatchNorm
    monkeypatch.setitem(sys.modules, late.__name__, late)
    yield
    gluon_syncbn.gluoncv.uninstall()
    assert late.SyncBatchNorm is mx.gluon.contrib.nn.SyncBatchNorm
    assert [dict(vars(owner)) for owner in owners] == former


def synchronized():
    """Arguments of a net, as a script takes them from --syncbn or --norm-layer."""
    kind = mx.gluon.contrib.nn.SyncBatchNorm
    return {"norm_layer": kind, "norm_kwargs": {"num_devices": len(CONTEXTS)}}


def segmentation_net(**norm):
    """In float64, and without dropout, which would draw other numbers."""
    net = gluoncv.model_zoo.FastSCNN(3, aux=True, crop_size=SIZE, **norm)
    net.apply(lambda b: setattr(b, "_rate", 0) if type(b) is nn.Dropout else None)
    net.initialize()
    net(mx.nd.ones((1, 3, SIZE, SIZE)))
    net.cast("float64")
    return net


def losses_of_segmentation(net, contexts):
    """The loop of segmentation/train.py."""
    model = parallel.DataParallelModel(net, contexts, True)
    # With size_average GluonCV divides gradients by the pixels of each shard.
    criterion = gluoncv.loss.MixSoftmaxCrossEntropyLoss(True, size_average=False)
    criterion = parallel.DataParallelCriterion(criterion, contexts, True)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-4})
    found = []
    for rows in 3, 2, 4:
        x = np.random.default_rng(rows).normal(size=(rows, 3, SIZE, SIZE))
        data, targets = mx.nd.array(x, dtype="float64"), mx.nd.array(x[:, 0] > 0)
        with autograd.record(True):
            losses = criterion(model(data), targets)
            mx.nd.waitall()
            autograd.backward(losses)
        trainer.step(rows)
        found.append(whole(losses))
    return np.concatenate(found)


def test_segmentation():
    """Losses tell whether parameters moved as on one context."""
    plain = segmentation_net(norm_layer=nn.BatchNorm, norm_kwargs={})
    net = segmentation_net(**synchronized())
    copy_parameters(plain, net)
    expected = losses_of_segmentation(plain, CONTEXTS[:1])
    np.testing.assert_allclose(losses_of_segmentation(net, CONTEXTS), expected, 1e-6)
    gluon_syncbn.check_replicas(net)


def train(net, parameters, step, batch):
    """Two steps, after which replicas are equal if all layers were synchronized."""
    trainer = gluon.Trainer(parameters, "sgd", {"learning_rate": 1e-3})
    for _ in range(2):
        step(list(zip(*batch)))
        trainer.step(len(CONTEXTS))
    gluon_syncbn.check_replicas(net)
    for mean in net.collect_params(".*running_mean").values():
        assert mean.data().asnumpy().any()
    for statistic in net.collect_params(".*running.*").values():
        assert np.isfinite(statistic.data().asnumpy()).all()


@pytest.mark.parametrize("name, kind", [("yolo3", "yolo3"), ("ssd", "ssd_300")])
def test_loop_over_contexts(name, kind):
    model = f"{kind}_mobilenet0.25_custom"
    net = gluoncv.model_zoo.get_model(model, **synchronized(), **nets.CUSTOM)
    if name == "ssd":  # a few norms are nodes of its graph
        gluon_syncbn.convert_sync_batchnorm(net, len(CONTEXTS))
    net.initialize(ctx=CONTEXTS, force_reinit=True)

    def step(shards):
        with autograd.record():
            outputs = [net(*shard) for shard in shards]
            losses = [nets.squares(*found[:2]) for found in outputs]
        autograd.backward(losses)

    arrays = map(mx.nd.array, nets.batch(name)[:-1])
    batch = [gluon.utils.split_and_load(array, CONTEXTS) for array in arrays]
    train(net, net.collect_params(), step, batch)


@pytest.mark.parametrize(
    "name",
    [
        "faster_rcnn_fpn_syncbn_resnet50_v1b_coco",
        "mask_rcnn_fpn_syncbn_resnet18_v1b_coco",
    ],
)
def test_predefined_nets_have_this_layer_only(name):
    """Their modules have imported contrib's; pyramids have its nodes."""
    options = {"pretrained_base": False, "num_devices": len(CONTEXTS)}
    net = gluoncv.model_zoo.get_model(name, **options)
    kinds = set()
    net.apply(lambda block: kinds.add(type(block)))
    assert gluon_syncbn.SyncBatchNorm in kinds
    graph = json.loads(net.features._cached_graph[1].tojson())
    norms = [x for x in graph["nodes"] if "Norm" in x["op"] or x["op"] == "Custom"]
    assert len(norms) > 25
    assert {node["attrs"].get("num_devices") for node in norms} == {"2"}


def test_roi_align_writes_zeros_where_it_skips_and_nowhere_else():
    x, rois = mx.nd.ones((1, 2, 8, 8)), mx.nd.array([[0, 0, 0, 4, 4], [-1] * 5] * 9)
    x.attach_grad()
    with autograd.record():
        y = mx.nd.contrib.ROIAlign(x, rois, (3, 3), 1.0, sample_ratio=2)
    y.backward()
    assert (y[0::2].asnumpy() == 1).all() and (y[1::2].asnumpy() == 0).all()
    assert x.grad.sum().asscalar() == pytest.approx(9 * 18)


def test_faster_rcnn():
    """The executor of train_faster_rcnn.py."""
    pyramid = {"sym_norm_layer": mx.sym.contrib.SyncBatchNorm}
    pyramid["sym_norm_kwargs"] = {"ndev": len(CONTEXTS)}
    kind = nets.custom_faster_rcnn_fpn
    net = nets.thin_rcnn(kind, 1, **synchronized(), **pyramid)
    net._roi_mode = "align"
    net.initialize(ctx=CONTEXTS, force_reinit=True)
    net.hybridize()
    entropy, huber = loss.SigmoidBinaryCrossEntropyLoss(), loss.HuberLoss()
    losses = entropy, huber, loss.SoftmaxCrossEntropyLoss(), huber
    kind = gluoncv.data.transforms.presets.rcnn.FasterRCNNDefaultTrainTransform
    transform = kind(96, 128, net, ashape=net.ashape, multi_stage=True)
    boxes = np.array([[20, 30, 90, 70, 0], [40, 10, 110, 60, 1]], "float32")
    pixels = np.random.default_rng(0).integers(0, 256, (len(CONTEXTS), 96, 128, 3))
    images = [transform(mx.nd.array(x, dtype="uint8"), boxes) for x in pixels]
    batch = gluoncv.data.batchify.FasterRCNNTrainBatchify(net, len(CONTEXTS))(images)
    batch = [[x.as_in_context(c) for x, c in zip(d, CONTEXTS)] for d in batch]

    task = gluoncv.model_zoo.rcnn.faster_rcnn.ForwardBackwardTask
    executor = parallel.Parallel(1, task(net, None, *losses, 1.0, False))

    def step(shards):
        for shard in shards:
            executor.put(shard)
        assert all(executor.get()[0].asscalar() > 0 for _ in shards)

    train(net, net.collect_train_params(), step, batch)
