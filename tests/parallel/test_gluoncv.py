"""GluonCV's model zoo takes the layer, by conversion and by norm_layer."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from support.helpers import set_mode

from gluon_syncbn import SyncBatchNorm, convert_sync_batchnorm

pytest.importorskip("gluoncv", reason="GluonCV is not installed")
from gluoncv import model_zoo

NORM = {"norm_layer": SyncBatchNorm, "norm_kwargs": {"num_devices": 2}}
SEGMENTATION = {
    "nclass": 3,
    "pretrained_base": False,
    "crop_size": 64,
    "backbone": "resnet50",
}
MODELS = {
    "fcn": lambda: model_zoo.FCN(aux=True, **SEGMENTATION, **NORM),
    "pspnet": lambda: model_zoo.PSPNet(aux=True, **SEGMENTATION, **NORM),
    "deeplabv3": lambda: model_zoo.DeepLabV3(aux=True, **SEGMENTATION, **NORM),
    "deeplabv3plus": lambda: model_zoo.DeepLabV3Plus(
        **{**SEGMENTATION, "backbone": "xception"}, **NORM
    ),
    "danet": lambda: model_zoo.danet.DANet(**SEGMENTATION, **NORM),
    "icnet": lambda: model_zoo.icnet.ICNet(**SEGMENTATION, **NORM),
    "fastscnn": lambda: model_zoo.FastSCNN(nclass=3, aux=True, **NORM),
    "yolo3": lambda: model_zoo.yolo3_darknet53_custom(
        classes=["a"], pretrained_base=False, **NORM
    ),
    "faster_rcnn": lambda: model_zoo.get_model(
        "faster_rcnn_fpn_syncbn_resnet50_v1b_coco",
        pretrained=False,
        pretrained_base=False,
        num_devices=2,
    ),
}


def norms(net):
    """Every kind of batch normalization in a net, with how often it occurs."""
    found = {}

    def count(block):
        if isinstance(block, nn.BatchNorm):
            found[type(block)] = found.get(type(block), 0) + 1

    net.apply(count)
    return found


@pytest.mark.parametrize(
    "name", ["fcn", "pspnet", "deeplabv3", "deeplabv3plus", "danet"]
)
def test_segmentation_nets_take_the_layer_everywhere(name):
    found = norms(MODELS[name]())
    assert set(found) == {SyncBatchNorm}
    assert found[SyncBatchNorm] > 40


@pytest.mark.parametrize("name", ["icnet", "fastscnn", "yolo3", "faster_rcnn"])
def test_nets_that_pass_the_layer_on_in_part_are_converted_in_whole(name):
    """GluonCV builds some of their layers without norm_layer or norm_kwargs."""
    net = convert_sync_batchnorm(MODELS[name](), num_devices=2)
    assert set(norms(net)) == {SyncBatchNorm}
    layers = []
    net.apply(lambda b: layers.append(b) if isinstance(b, SyncBatchNorm) else None)
    assert {layer.num_devices for layer in layers} == {2}


@pytest.mark.parametrize("name", ["resnet18_v1b", "mobilenet0.25", "densenet121"])
def test_classification_nets_are_converted(name):
    net = model_zoo.get_model(name, pretrained=False)
    before = norms(net)
    convert_sync_batchnorm(net, 2)
    assert norms(net) == {SyncBatchNorm: sum(before.values())}


@pytest.mark.timeout(280)
@pytest.mark.parametrize("mode", ["hybridize", "static_shape"])
def test_fast_scnn_trains_on_two_contexts(mode, devices):
    net = convert_sync_batchnorm(model_zoo.FastSCNN(nclass=3, crop_size=64), 2)
    net.initialize(mx.init.Xavier())
    # GluonCV has initialized a part of the net on cpu(0) already.
    net.collect_params().reset_ctx(devices.contexts)
    set_mode(net, mode)
    xs = devices.split(mx.nd.random.normal(shape=(3, 3, 64, 64)))
    for _ in range(2):
        with autograd.record():
            outputs = devices.map(lambda x: net(x)[0], xs)
        devices.map(lambda y: y.backward(), outputs)
        assert all(np.isfinite(y.asnumpy()).all() for y in outputs)
    mx.nd.waitall()
    for name, parameter in net.collect_params(".*running_.*").items():
        first, second = (data.asnumpy() for data in parameter.list_data())
        assert (first == second).all(), name
