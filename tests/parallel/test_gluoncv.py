"""The loops of GluonCV's scripts, after `install`, train on two contexts as on one."""

import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import gluon_syncbn
from gluon_syncbn.layer.finding import norms_of

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import Trainer, nn
from support.helpers import copy_parameters, cpus, differentiate, whole

gluoncv = pytest.importorskip("gluoncv", reason="GluonCV is not installed")

parallel = gluoncv.utils.parallel
CONTEXTS, SIZE = cpus(2), 64


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
    late = ModuleType("gluoncv.late")  # like a module that is imported after install
    late.SyncBatchNorm = mx.gluon.contrib.nn.SyncBatchNorm
    monkeypatch.setitem(sys.modules, late.__name__, late)
    yield
    gluon_syncbn.gluoncv.uninstall()
    assert late.SyncBatchNorm is mx.gluon.contrib.nn.SyncBatchNorm
    assert [dict(vars(owner)) for owner in owners] == former


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
    """Later losses are equal only if parameters were updated as on one context."""
    plain = segmentation_net(norm_layer=nn.BatchNorm, norm_kwargs={})
    options = {"num_devices": len(CONTEXTS)}
    kind = mx.gluon.contrib.nn.SyncBatchNorm
    net = segmentation_net(norm_layer=kind, norm_kwargs=options)
    copy_parameters(plain, net)
    expected = losses_of_segmentation(plain, CONTEXTS[:1])
    np.testing.assert_allclose(losses_of_segmentation(net, CONTEXTS), expected, 1e-6)
    gluon_syncbn.check_replicas(net)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kind, net", [("faster", "resnet50"), ("mask", "resnet18")])
def test_predefined_nets_use_this_layer(kind, net):
    """MXNet's SyncBatchNorm is replaced in GluonCV's modules and feature pyramids."""
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
    y = differentiate(mx.nd.contrib.ROIAlign, x, rois, (3, 3), 1.0, 2)
    assert (y[0::2].asnumpy() == 1).all() and (y[1::2].asnumpy() == 0).all()
    assert x.grad.sum().asscalar() == pytest.approx(9 * 18)


@pytest.mark.usefixtures("installed")
def test_executor():
    """The loop of train_faster_rcnn.py."""
    results = []
    for contexts in CONTEXTS, CONTEXTS[:1]:
        net = nn.HybridSequential()
        norm = mx.gluon.contrib.nn.SyncBatchNorm()
        net.add(nn.Dense(2, in_units=3), norm, nn.Dense(1))
        net.initialize(mx.init.One(), ctx=contexts)
        run = partial(differentiate, lambda x, net=net: (net(x) ** 2).sum())
        executor = parallel.Parallel(1, SimpleNamespace(forward_backward=run))
        trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        losses = []
        for _ in range(2):
            x = mx.nd.array([[1, 2, 3], [3, 5, 4], [-1, 2, 0], [2, 2, 2]])
            for shard in gluon.utils.split_and_load(x, contexts):
                executor.put(shard)
            losses.append(sum(executor.get().asscalar() for _ in contexts))
            trainer.step(4)
        results.append(losses)
    np.testing.assert_allclose(*results, rtol=1e-5)
