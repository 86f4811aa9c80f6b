"""GluonCV's detection and pose nets, thin, and the losses that they are trained with.

Called by test_detection_nets.py. A function makes the net for `rows` images on each
context, and a function of its outputs that gives one loss for each image. `batch` gives
what the net is called with, and weights of the images.
"""

import functools
from collections import OrderedDict
from unittest import mock

import numpy as np
from gluoncv.model_zoo.center_net.center_net import CenterNet
from gluoncv.model_zoo.center_net.deconv_resnet import DeconvResnet
from gluoncv.model_zoo.rcnn.faster_rcnn.faster_rcnn import custom_faster_rcnn_fpn
from gluoncv.model_zoo.rcnn.mask_rcnn import custom_mask_rcnn_fpn
from gluoncv.model_zoo.resnet import BottleneckV1, ResNetV1
from gluoncv.model_zoo.resnetv1b import ResNetV1b
from gluoncv.model_zoo.simple_pose.simple_pose_resnet import SimplePoseResNet
from gluoncv.model_zoo.ssd.ssd import SSD
from gluoncv.model_zoo.yolo.darknet import DarknetV3, darknet_spec
from gluoncv.model_zoo.yolo.yolo3 import YOLOV3
from mxnet import sym
from mxnet.gluon import nn

IMAGES, SIZE, CLASSES = 4, 64, ["a", "b"]
MASKS = {"mask_channels": 8, "target_roi_scale": 2, "num_fcn_convs": 1}


def batch(name):
    """Images, labels where the net itself takes them, and weights of the losses."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(IMAGES, 3, SIZE, SIZE))]
    if name in ("yolo3", "faster_rcnn", "mask_rcnn"):
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
    elif len(arrays) == 2:
        arrays.append(rng.integers(0, len(CLASSES), (IMAGES, 2, 1)))
    return [*arrays, np.arange(1, IMAGES + 1) / IMAGES]


def squares(*outputs):
    """For each image the means of squares, added up."""
    return sum((y * y).mean(axis=0, exclude=True) for y in outputs)


def yolo3(rows):
    layers, channels = darknet_spec["v3"][53]
    darknet = DarknetV3(layers, [channel // 8 for channel in channels]).features
    stages = darknet[:15], darknet[15:24], darknet[24:]
    anchors = [[10, 13, 16, 30, 33, 23], [30, 61, 62, 45, 59, 119], [116, 90] * 3]
    net = YOLOV3(stages, [64, 32, 16], anchors, [8, 16, 32], CLASSES, (16, 16))
    return net, lambda *losses: sum(losses)


def ssd(rows):
    """As ssd_512_resnet50_v1."""
    net = SSD(
        network=ResNetV1(BottleneckV1, [3, 4, 6, 3], [8, 8, 16, 24, 32]),
        base_size=512,
        features=["stage3_activation5", "stage4_activation2"],
        num_filters=[16, 16, 8, 8],
        sizes=[51.2, 133.12, 215.04, 296.96, 378.88, 460.8, 542.72],
        ratios=[[1, 2, 0.5]] + [[1, 2, 0.5, 3, 1 / 3]] * 3 + [[1, 2, 0.5]] * 2,
        steps=[16, 32, 64, 128, 256, 512],
        classes=CLASSES,
        min_depth=8,
        anchor_alloc_size=16,
    )
    return net, lambda classes, boxes, anchors: squares(classes, boxes)


def with_thin_resnet(kind, *arguments, **more):
    """Makes what asks GluonCV itself for its ResNet-18, of an eighth of the width."""
    make_layer = ResNetV1b._make_layer

    def thin(self, stage, block, planes, *rest, **more):
        return make_layer(self, stage, block, planes // 8, *rest, **more)

    with mock.patch.object(ResNetV1b, "_make_layer", thin):
        return kind(*arguments, **more)


def center_net(rows):
    base = with_thin_resnet(
        DeconvResnet, deconv_filters=(16, 8, 8), pretrained_base=False
    )
    outputs = {"heatmap": len(CLASSES), "wh": 2, "reg": 2}
    heads = OrderedDict((name, {"num_output": n}) for name, n in outputs.items())
    net = CenterNet(base, heads, CLASSES, head_conv_channel=8)
    return net, squares


def simple_pose(rows):
    net = with_thin_resnet(
        SimplePoseResNet, "resnet18_v1b", num_deconv_filters=(16, 16, 16)
    )
    return net, squares


def thin_rcnn(kind, rows, **more):
    """On a feature pyramid, for so many images on each context."""
    return with_thin_resnet(
        kind,
        CLASSES,
        pretrained_base=False,
        num_fpn_filters=16,
        num_box_head_conv=1,
        num_box_head_conv_filters=16,
        num_box_head_dense_filters=16,
        min_stage=2,
        max_stage=6,
        roi_mode="pool",  # MXNet's ROIAlign leaves what it skips uninitialized on CPUs
        strides=(4, 8, 16, 32, 64),
        scales=(2, 4, 8, 16, 32),
        rpn_channel=16,
        rpn_train_pre_nms=100,
        rpn_train_post_nms=32,
        num_sample=16,
        per_device_batch_size=rows,
        **more,
    )


def rcnn(rows, kind, predictions, **more):
    """With norms in the pyramid and in the boxes' head."""
    net = thin_rcnn(
        kind,
        rows,
        norm_layer=functools.partial(nn.BatchNorm),  # BatchNorm itself would be frozen
        norm_kwargs={},
        sym_norm_layer=sym.BatchNorm,
        alloc_size=(32, 32),
        **more,
    )
    # It is made at the first call otherwise, when the net is initialized already.
    assert net.target_generator

    def loss(*outputs):
        of_proposals = outputs[predictions + 3 : predictions + 5]
        return squares(*outputs[:predictions], *of_proposals)

    return net, loss


def faster_rcnn(rows):
    return rcnn(rows, custom_faster_rcnn_fpn, 2)


def mask_rcnn(rows):
    return rcnn(rows, custom_mask_rcnn_fpn, 3, **MASKS)
