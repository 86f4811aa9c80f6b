"""GluonCV's detection and pose nets, and the losses that they are trained with.

A function makes the net for `rows` images on each context, and a function of its
outputs that gives one loss for each image. `batch` gives what the net is called with,
and weights of the images.
"""

import functools
from unittest import mock

import numpy as np
from gluoncv.model_zoo import get_model
from gluoncv.model_zoo.rcnn.faster_rcnn.faster_rcnn import custom_faster_rcnn_fpn
from gluoncv.model_zoo.rcnn.mask_rcnn import custom_mask_rcnn_fpn
from gluoncv.model_zoo.resnetv1b import ResNetV1b
from mxnet import sym
from mxnet.gluon import nn

IMAGES, SIZE, CLASSES = 4, 64, ["a", "b"]
CUSTOM = {"classes": CLASSES, "pretrained_base": False}
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
    net = get_model("yolo3_mobilenet0.25_custom", **CUSTOM)
    return net, lambda *losses: sum(losses)


def ssd(rows):
    net = get_model("ssd_300_mobilenet0.25_custom", **CUSTOM)
    return net, lambda classes, boxes, anchors: squares(classes, boxes)


def thin_resnet():
    """In the block GluonCV makes its ResNet-18 with an eighth of the width."""
    make_layer = ResNetV1b._make_layer

    def thin(self, stage, block, planes, *rest, **more):
        return make_layer(self, stage, block, planes // 8, *rest, **more)

    return mock.patch.object(ResNetV1b, "_make_layer", thin)


def center_net(rows):
    with thin_resnet():
        return get_model("center_net_resnet18_v1b_voc", pretrained_base=False), squares


def simple_pose(rows):
    with thin_resnet():
        return get_model("simple_pose_resnet18_v1b", pretrained_base=False), squares


def thin_rcnn(kind, rows, **more):
    """With a feature pyramid, for so many images on each context."""
    with thin_resnet():
        return kind(
            num_fpn_filters=16,
            num_box_head_conv=1,
            num_box_head_conv_filters=16,
            num_box_head_dense_filters=16,
            min_stage=2,
            max_stage=6,
            roi_mode="pool",  # MXNet's ROIAlign leaves rows that it skips uninitialized
            strides=(4, 8, 16, 32, 64),
            scales=(2, 4, 8, 16, 32),
            rpn_channel=16,
            rpn_train_pre_nms=100,
            rpn_train_post_nms=32,
            num_sample=16,
            per_device_batch_size=rows,
            **CUSTOM,
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
