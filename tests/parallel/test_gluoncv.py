"""GluonCV's nets and the loops of its scripts train on two contexts as on one.

Detection nets have several inputs, SymbolBlocks, shapes that depend on the number of
images, and operators whose output jumps where proposals change places, which rounding
in float64 does not cause.
"""

import functools
import sys
from types import ModuleType
from unittest import mock

import gluon_syncbn
from gluon_syncbn.layer.finding import norms_of

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, sym
from mxnet.gluon import Block, Constant, Trainer, loss, nn
from mxnet.gluon.utils import split_and_load
from support.helpers import copy_parameters, cpus, set_mode, whole

gluoncv = pytest.importorskip("gluoncv", reason="GluonCV is not installed")
from gluoncv.model_zoo.rcnn.faster_rcnn.faster_rcnn import (  # noqa: E402
    custom_faster_rcnn_fpn,
)
from gluoncv.model_zoo.resnetv1b import ResNetV1b  # noqa: E402

parallel = gluoncv.utils.parallel
CONTEXTS, IMAGES, SIZE, CLASSES = cpus(2), 4, 64, ["a", "b"]

# ---- Nets, and the losses of each image.


def batch(name):
    """Return images, the labels that a net takes as input, and the losses' weights."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(IMAGES, 3, SIZE, SIZE))]
    if name != "ssd":
        corners = rng.uniform(0, SIZE / 2, (IMAGES, 2, 2))
        sizes = rng.uniform(SIZE / 4, SIZE / 2, (IMAGES, 2, 2))
        arrays.append(np.concatenate([corners, corners + sizes], axis=-1))
    if name == "yolo3":
        places = IMAGES, 3 * sum((SIZE // stride) ** 2 for stride in (8, 16, 32))
        arrays.append(rng.random((*places, 1)) < 0.1)  # whether there is an object
        arrays.append(rng.random((*places, 2)))
        arrays.append(rng.normal(size=(*places, 2)))
        arrays.append(rng.uniform(1, 2, (*places, 2)))
        arrays.append(np.eye(len(CLASSES))[rng.integers(0, len(CLASSES), places)])
    elif name == "faster_rcnn":
        arrays.append(rng.integers(0, len(CLASSES), (IMAGES, 2, 1)))
    return [*arrays, np.arange(1, IMAGES + 1) / IMAGES]


def squares(*outputs):
    """Sum the means of squares for each image."""
    return sum((y * y).mean(axis=0, exclude=True) for y in outputs)


def mobilenet(kind):
    options = {"classes": CLASSES, "pretrained_base": False}
    return gluoncv.model_zoo.get_model(f"{kind}_mobilenet0.25_custom", **options)


def thin_faster_rcnn(rows, **options):
    """Make a feature pyramid on an eighth of ResNet-18, for `rows` images a context."""
    make_layer = ResNetV1b._make_layer

    def thin(self, stage, block, planes, *rest, **more):
        return make_layer(self, stage, block, planes // 8, *rest, **more)

    with mock.patch.object(ResNetV1b, "_make_layer", thin):
        return custom_faster_rcnn_fpn(
            CLASSES,
            pretrained_base=False,
            num_fpn_filters=16,
            num_box_head_conv=1,
            num_box_head_conv_filters=16,
            num_box_head_dense_filters=16,
            min_stage=2,
            max_stage=6,
            strides=(4, 8, 16, 32, 64),
            scales=(2, 4, 8, 16, 32),
            rpn_channel=16,
            rpn_train_pre_nms=100,
            rpn_train_post_nms=32,
            num_sample=16,
            per_device_batch_size=rows,
            **options,
        )


def make(name, rows, contexts):
    """Return a float64 net, and a function that makes losses of its outputs."""
    if name == "faster_rcnn":
        norm = functools.partial(nn.BatchNorm)  # BatchNorm itself would be frozen
        # MXNet's ROIAlign leaves rows that it skips uninitialized.
        options = {"roi_mode": "pool", "alloc_size": (32, 32), "norm_layer": norm}
        options.update(norm_kwargs={}, sym_norm_layer=sym.BatchNorm)
        net = thin_faster_rcnn(rows, **options)
        # It is made at the first call otherwise, when the net is initialized already.
        assert net.target_generator

        def criterion(*outputs):
            return squares(*outputs[:2], *outputs[5:7])

    else:
        net = mobilenet({"ssd": "ssd_300"}.get(name, name))

        def criterion(*outputs):
            return squares(*outputs[:2]) if name == "ssd" else sum(outputs)

    net.initialize(ctx=contexts, force_reinit=True)  # a part of it is
    net.cast("float64")
    return net, criterion


# ---- Training equals nn.BatchNorm on one device.


@pytest.fixture
def gluoncv_in_float64(monkeypatch):
    """GluonCV takes float64 for float32, and samples the same regions everywhere."""
    for module in mx.nd, mx.sym:
        arange = functools.partial(module.arange, dtype="float64")

        def uniform(low, high, shape, arange=arange):
            return arange(shape[0]) / shape[0]

        def cast(data, dtype, cast=module.cast):
            return cast(data, dtype="float64" if dtype == "float32" else dtype)

        monkeypatch.setattr(module, "arange", arange)
        monkeypatch.setattr(module.random, "uniform", uniform)
        monkeypatch.setattr(module, "cast", cast)
        # MXNet's operator does not know float64.
        monkeypatch.setattr(module, "amp_multicast", lambda *arrays, **_: arrays)


class Weighted(Block):
    """A net with its loss: the losses of images, times weights."""

    def __init__(self, net, criterion):
        super().__init__()
        self.net, self.criterion = net, criterion

    def forward(self, *inputs_and_weights):
        *inputs, weights = inputs_and_weights
        return self.criterion(*self.net(*inputs)) * weights


def train_detection(net, criterion, name, steps, contexts, is_parallel=False):
    """Return the losses of steps of SGD on so many images, in one call or in a loop."""
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 2e-3})
    weighted, found = Weighted(net, criterion), []
    if is_parallel:
        gluon_syncbn.make_parallel(weighted, contexts)
        contexts = contexts[:1]
    for rows in steps:
        arrays = [mx.nd.array(a[:rows], dtype="float64") for a in batch(name)]
        with autograd.record():
            shards = zip(*(split_and_load(array, contexts) for array in arrays))
            losses = [weighted(*shard) for shard in shards]
        autograd.backward(losses)
        trainer.step(rows)
        found.append(sum(float(each.sum().asscalar()) for each in losses))
    return np.array(found)


def random_values(net, name):
    """Set He's weights, and norms that are no identities."""
    with autograd.record():
        net(*(mx.nd.array(a, dtype="float64") for a in batch(name)[:-1]))
    rng = np.random.default_rng(0)
    for parameter in net.collect_params().values():
        shape, kind = parameter.shape, parameter.name
        if isinstance(parameter, Constant):
            continue
        if len(shape) > 1:
            array = rng.normal(0, np.sqrt(2 / np.prod(shape[1:])), shape)
        else:
            array = rng.normal(kind.endswith("gamma"), 0.1, shape)
        array = np.ones(shape) if kind.endswith("var") else array
        parameter.set_data(mx.nd.array(array, dtype="float64"))


@pytest.mark.usefixtures("gluoncv_in_float64")
@pytest.mark.parametrize(
    "name, mode, way, steps",
    [
        ("yolo3", "static_shape", "plain loop", (IMAGES, IMAGES)),
        # One context gets no image where there is one; three are shared unevenly.
        ("ssd", "hybridize", "parallel", (1, 3, 3)),
        ("faster_rcnn", "hybridize", "parallel", (IMAGES, IMAGES)),
    ],
)
def test_trains_hybridized_like_batch_norm(name, mode, way, steps):
    plain, criterion = make(name, IMAGES, cpus(1))
    random_values(plain, name)
    net, _ = make(name, IMAGES // 2, CONTEXTS)
    copy_parameters(plain, net)
    right = train_detection(plain, criterion, name, steps, cpus(1))
    if way == "plain loop":
        net = gluon_syncbn.convert_sync_batchnorm(net, 2)
        gluon_syncbn.allow_plain_loop(net)
    arguments = criterion, name, steps, CONTEXTS, way == "parallel"
    result = train_detection(set_mode(net, mode), *arguments)
    # Steps amplify the rounding of float64 by less than a wrong statistic changes.
    np.testing.assert_allclose(result, right, rtol=1e-7)
    assert (abs(np.diff(right)) > 1e-4 * abs(right[0])).all()
    gluon_syncbn.check_replicas(net)


# ---- The loops of GluonCV's scripts, after `install`.


@pytest.fixture
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
    """Return arguments of a net, as scripts make them of --syncbn and --norm-layer."""
    kind = mx.gluon.contrib.nn.SyncBatchNorm
    return {"norm_layer": kind, "norm_kwargs": {"num_devices": len(CONTEXTS)}}


def segmentation_net(**norm):
    """Make a float64 net without dropout, which would draw other numbers."""
    net = gluoncv.model_zoo.FastSCNN(3, aux=True, crop_size=SIZE, **norm)
    net.apply(lambda b: setattr(b, "_rate", 0) if type(b) is nn.Dropout else None)
    net.initialize()
    net(mx.nd.ones((1, 3, SIZE, SIZE)))
    net.cast("float64")
    return net


def losses_of_segmentation(net, contexts):
    """Run the loop of segmentation/train.py; return its losses."""
    model = parallel.DataParallelModel(net, contexts, True)
    # GluonCV's size_average divides gradients by the pixels of each shard.
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


@pytest.mark.usefixtures("installed")
def test_segmentation():
    """Losses show whether parameters moved as on one context."""
    plain = segmentation_net(norm_layer=nn.BatchNorm, norm_kwargs={})
    net = segmentation_net(**synchronized())
    copy_parameters(plain, net)
    expected = losses_of_segmentation(plain, CONTEXTS[:1])
    np.testing.assert_allclose(losses_of_segmentation(net, CONTEXTS), expected, 1e-6)
    gluon_syncbn.check_replicas(net)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kind, net", [("faster", "resnet50"), ("mask", "resnet18")])
def test_predefined_nets_have_this_layer_only(kind, net):
    """Their modules have imported contrib's; pyramids have its nodes."""
    name = f"{kind}_rcnn_fpn_syncbn_{net}_v1b_coco"
    options = {"pretrained_base": False, "num_devices": len(CONTEXTS)}
    net = gluoncv.model_zoo.get_model(name, **options)
    kinds = set()
    net.apply(lambda block: kinds.add(type(block)))
    assert gluon_syncbn.SyncBatchNorm in kinds
    norms = norms_of(net.features)
    assert len(norms) > 25
    assert {norm.layer._sync.settings.num_devices for norm in norms} == {2}


@pytest.mark.usefixtures("installed")
def test_roi_align_writes_zeros_where_it_skips_and_nowhere_else():
    x, rois = mx.nd.ones((1, 2, 8, 8)), mx.nd.array([[0, 0, 0, 4, 4], [-1] * 5] * 9)
    x.attach_grad()
    with autograd.record():
        y = mx.nd.contrib.ROIAlign(x, rois, (3, 3), 1.0, sample_ratio=2)
    y.backward()
    assert (y[0::2].asnumpy() == 1).all() and (y[1::2].asnumpy() == 0).all()
    assert x.grad.sum().asscalar() == pytest.approx(9 * 18)


@pytest.mark.usefixtures("installed")
def test_faster_rcnn():
    """The executor of train_faster_rcnn.py."""
    pyramid = {"sym_norm_layer": mx.sym.contrib.SyncBatchNorm, "roi_mode": "align"}
    pyramid["sym_norm_kwargs"] = {"ndev": len(CONTEXTS)}
    net = thin_faster_rcnn(1, **synchronized(), **pyramid)
    net.initialize(ctx=CONTEXTS, force_reinit=True)
    net.hybridize()
    entropy, huber = loss.SigmoidBinaryCrossEntropyLoss(), loss.HuberLoss()
    losses = entropy, huber, loss.SoftmaxCrossEntropyLoss(), huber
    kind = gluoncv.data.transforms.presets.rcnn.FasterRCNNDefaultTrainTransform
    transform = kind(96, 128, net, ashape=net.ashape, multi_stage=True)
    boxes = np.array([[20, 30, 90, 70, 0], [40, 10, 110, 60, 1]], "float32")
    pixels = np.random.default_rng(0).integers(0, 256, (len(CONTEXTS), 96, 128, 3))
    images = [transform(mx.nd.array(x, dtype="uint8"), boxes) for x in pixels]
    arrays = gluoncv.data.batchify.FasterRCNNTrainBatchify(net, len(CONTEXTS))(images)
    arrays = [[x.as_in_context(c) for x, c in zip(d, CONTEXTS)] for d in arrays]
    task = gluoncv.model_zoo.rcnn.faster_rcnn.ForwardBackwardTask
    executor = parallel.Parallel(1, task(net, None, *losses, 1.0, False))
    trainer = Trainer(net.collect_train_params(), "sgd", {"learning_rate": 1e-3})
    for _ in range(2):
        for shard in zip(*arrays):
            executor.put(shard)
        assert all(executor.get()[0].asscalar() > 0 for _ in CONTEXTS)
        trainer.step(len(CONTEXTS))
    gluon_syncbn.check_replicas(net)  # equal if all layers were synchronized
    for statistic in net.collect_params(".*running.*").values():
        array = statistic.data().asnumpy()
        assert np.isfinite(array).all() and array.any()
