"""The executor of GluonCV's scripts for Faster and Mask R-CNN, on two CPU contexts."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import loss
from support.helpers import cpus, value

from gluon_syncbn import SyncBatchNorm, check_replicas

gluoncv = pytest.importorskip("gluoncv", reason="GluonCV is not installed")
from gluoncv.data import batchify  # noqa: E402
from gluoncv.data.transforms.presets import rcnn as transforms  # noqa: E402
from gluoncv.model_zoo.rcnn import faster_rcnn, mask_rcnn  # noqa: E402
from gluoncv.utils import parallel  # noqa: E402
from support import detection_nets  # noqa: E402

CONTEXTS = cpus(2)
BOTH = [
    loss.SigmoidBinaryCrossEntropyLoss(),
    loss.HuberLoss(rho=1 / 9),
    loss.SoftmaxCrossEntropyLoss(),
    loss.HuberLoss(),
]


def faster(norm):
    net = detection_nets.thin_rcnn(detection_nets.custom_faster_rcnn_fpn, 1, **norm)
    options = {"mix_ratio": 1.0, "amp_enabled": False}
    task = faster_rcnn.ForwardBackwardTask
    return net, lambda trainer: task(net, trainer, *BOTH, **options), 4


def mask(norm):
    more = {**norm, **detection_nets.MASKS}
    net = detection_nets.thin_rcnn(detection_nets.custom_mask_rcnn_fpn, 1, **more)
    losses = [*BOTH, loss.SigmoidBinaryCrossEntropyLoss()]
    task = mask_rcnn.ForwardBackwardTask
    return net, lambda trainer: task(net, trainer, *losses, amp_enabled=False), 5


def batch_of_two(net, with_masks):
    """What the scripts' loader gives for an image on each context, with two objects."""
    transform = transforms.FasterRCNNDefaultTrainTransform(
        192, 256, net, ashape=net.ashape, multi_stage=True
    )
    rng, images = np.random.default_rng(0), []
    boxes = np.array([[20, 30, 90, 100, 0], [60, 80, 180, 150, 1]], "float32")
    for _ in CONTEXTS:
        image = mx.nd.array(rng.integers(0, 256, (192, 256, 3)), dtype="uint8")
        images.append(transform(image, boxes))
        if with_masks:
            masks = np.zeros((len(boxes), *images[-1][0].shape[1:]))
            masks[:, 80:100, 60:90] = 1
            images[-1] += (mx.nd.array(masks),)
    kind = batchify.MaskRCNNTrainBatchify if with_masks else None
    return (kind or batchify.FasterRCNNTrainBatchify)(net, len(CONTEXTS))(images)


@pytest.mark.parametrize("make", [faster, mask])
def test_rcnn_script(make, installed):
    """The loops of train_faster_rcnn.py and train_mask_rcnn.py, with --norm-layer."""
    norm_layer, norm_kwargs = mx.gluon.contrib.nn.SyncBatchNorm, {"num_devices": 2}
    net, task, count = make({"norm_layer": norm_layer, "norm_kwargs": norm_kwargs})
    for parameter in net.collect_params().values():
        if parameter._data is None:
            parameter.initialize()
    net.collect_params().reset_ctx(CONTEXTS)
    batch = batch_of_two(net, make is mask)
    net.collect_params().setattr("grad_req", "null")
    parameters = net.collect_train_params()
    parameters.setattr("grad_req", "write")
    options = {"learning_rate": 0.001, "wd": 1e-4, "momentum": 0.9}
    trainer = gluon.Trainer(parameters, "sgd", options, kvstore="device")
    executor = parallel.Parallel(1, task(trainer))
    net.hybridize(static_alloc=False)
    batch = [[x.as_in_context(c) for x, c in zip(d, CONTEXTS)] for d in batch]
    for _ in range(2):
        for data in zip(*batch):
            executor.put(data)
        results = [executor.get() for _ in CONTEXTS]
        trainer.step(len(CONTEXTS))
        assert [result[0].context for result in results] == CONTEXTS
        for result in results:
            losses = [metric.asscalar() for metric in result[:count]]
            assert np.isfinite(losses).all() and losses[0] > 0
    check_replicas(net)
    moved = [value(p) for p in net.collect_params(".*running_mean").values()]
    assert moved and all(mean.any() for mean in moved)


class Synchronized:
    """Forward and backward of a layer that waits for the other context."""

    def __init__(self):
        self.layer = SyncBatchNorm(in_channels=1, num_devices=2)
        self.layer.initialize(ctx=CONTEXTS)

    def forward_backward(self, shard):
        (x,) = shard
        with autograd.record():
            y = self.layer(x)
        y.backward()
        return y


def shards(*values):
    """For each value a shard on the next context."""
    contexts = CONTEXTS * (len(values) // 2)
    return [(mx.nd.full((1, 1), v, ctx=c),) for v, c in zip(values, contexts)]


def test_results_come_in_the_order_of_the_shards(installed):
    executor = parallel.Parallel(1, Synchronized())
    for shard in shards(0, 2, 3, 1):  # two rounds
        executor.put(shard)
    signs = [np.sign(executor.get().asscalar()) for _ in range(4)]
    assert signs == [-1, 1, 1, -1]
    with pytest.raises(IndexError, match="get was called more often than put"):
        executor.get()
    with pytest.raises(ValueError, match=r"x is \[1\], expected .* one NDArray"):
        executor.put([1])


def test_an_exception_arrives_and_the_next_step_works(installed):
    executor = parallel.Parallel(1, Synchronized())
    first, second = shards(0, 2)
    executor.put(first)
    executor.put((*second, "too many"))
    with pytest.raises(ValueError, match="too many values"):
        executor.get()
    for shard in first, second:
        executor.put(shard)
    assert [executor.get().context for _ in CONTEXTS] == CONTEXTS
