"""GluonCV's model zoo takes the layer, by conversion and by norm_layer."""

import mxnet as mx
import pytest
from mxnet.gluon import Trainer, nn
from support.helpers import differentiate

from gluon_syncbn import (
    SyncBatchNorm,
    check_replicas,
    convert_sync_batchnorm,
    make_parallel,
)

pytest.importorskip("gluoncv", reason="GluonCV is not installed")
from gluoncv import model_zoo

NORM = {"norm_layer": SyncBatchNorm, "norm_kwargs": {"num_devices": 2}}
ARGUMENTS = {"nclass": 3, "pretrained_base": False, "crop_size": 64, **NORM}
TAKING = {  # what passes norm_layer on to all its layers
    "fcn": lambda: model_zoo.FCN(aux=True, backbone="resnet50", **ARGUMENTS),
    "pspnet": lambda: model_zoo.PSPNet(aux=True, backbone="resnet50", **ARGUMENTS),
    "deeplabv3": lambda: model_zoo.DeepLabV3(backbone="resnet50", **ARGUMENTS),
}
CONVERTED = {  # what makes some of its layers without it
    "icnet": lambda: model_zoo.icnet.ICNet(backbone="resnet50", **ARGUMENTS),
    "yolo3": lambda: model_zoo.yolo3_darknet53_custom(
        classes=["a"], pretrained_base=False, **NORM
    ),
    "mobilenet": lambda: model_zoo.get_model("mobilenet0.25", pretrained=False),
}


def norms(net):
    found = []
    net.apply(lambda b: found.append(b) if isinstance(b, nn.BatchNorm) else None)
    return found


@pytest.mark.parametrize("name", [*TAKING, *CONVERTED])
def test_every_norm_of_a_net_is_the_layer(name):
    net = {**TAKING, **CONVERTED}[name]()
    before = len(norms(net))
    if name in CONVERTED:
        convert_sync_batchnorm(net, num_devices=2)
    found = norms(net)
    assert {type(layer) for layer in found} == {SyncBatchNorm}
    assert {layer.num_devices for layer in found} == {2}
    assert len(found) == before > 20


def test_fast_scnn_trains_on_two_contexts(devices):
    """A part of it is initialized on cpu(0) by GluonCV."""
    net = model_zoo.FastSCNN(nclass=3, crop_size=64)
    net.initialize(mx.init.Xavier())
    net = make_parallel(net, devices.contexts, reset_ctx=True)
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    for rows in 3, 3, 1:
        x = mx.nd.random.normal(shape=(rows, 3, 64, 64))
        loss = differentiate(lambda x: (net(x)[0] ** 2).mean(), x)
        trainer.step(rows)
        assert 0 < loss.asscalar() < 100
    check_replicas(net)
