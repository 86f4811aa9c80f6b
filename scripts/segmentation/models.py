"""Contexts, and a GluonCV segmentation model on them with MXNet's own BatchNorm.

`engine.py` converts its layers, because some models (ICNet, FastSCNN) make layers that
GluonCV's `norm_layer` and `norm_kwargs` do not reach.
"""

import contextlib
import importlib
import io

import gluon_syncbn

import mxnet as mx

from .errors import UserError

# name: (class in gluoncv.model_zoo, weights of the outputs in the loss)
_KINDS = {
    "fastscnn": ("fastscnn.FastSCNN", (1.0,)),  # its auxiliary head is optional
    "fcn": ("fcn.FCN", (1.0, 0.2)),
    "pspnet": ("pspnet.PSPNet", (1.0, 0.2)),
    "deeplabv3": ("deeplabv3.DeepLabV3", (1.0, 0.2)),
    "deeplabv3plus": ("deeplabv3_plus.DeepLabV3Plus", (1.0, 0.2)),
    "danet": ("danet.DANet", (1.0, 1.0, 1.0)),
    "icnet": ("icnet.ICNet", (1.0, 0.4, 0.4, 1.0)),
}


def output_weights(config):
    """The weight of each of the net's outputs in the loss; the first predicts."""
    return _KINDS[config.model][1]


def open_contexts(kind, count):
    """`count` contexts of the kind 'cpu' or 'gpu', or a UserError that says why not."""
    if kind == "cpu":
        gluon_syncbn.keep_freed_memory()
        return [mx.cpu(index) for index in range(count)]
    try:
        there = mx.context.num_gpus()
    except mx.MXNetError:
        there = 0
    if count > there:
        raise UserError(f"--num-devices is {count}, but MXNet sees {there} GPU(s).")
    return [mx.gpu(index) for index in range(count)]


def build_model(config, num_classes, contexts):
    """The net on `contexts`; its parameters are drawn from the seed, or pretrained."""
    mx.random.seed(config.seed)
    module, kind = _KINDS[config.model][0].split(".")
    kind = getattr(importlib.import_module(f"gluoncv.model_zoo.{module}"), kind)
    options = {"aux": False} if config.model == "fastscnn" else {}
    if config.backbone:
        options["backbone"] = config.backbone
    options.update(crop_size=config.crop_size, ctx=contexts)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its crop size
            net = kind(num_classes, pretrained_base=config.pretrained, **options)
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"GluonCV cannot make {config.model} with --backbone {config.backbone!r}: "
            f"{' '.join(str(error).split())}."
        ) from None
    for name, parameter in net.collect_params().items():
        parameter.lr_mult = 1.0  # GluonCV's heads have 10
        if name.endswith(("gamma", "beta", "bias")):
            parameter.wd_mult = 0.0
    if not config.pretrained:
        net.initialize(mx.init.Xavier(magnitude=2), ctx=contexts, force_reinit=True)
    net.collect_params().reset_ctx(contexts)
    side = config.crop_size
    net(mx.nd.zeros((1, 3, side, side), ctx=contexts[0]))  # allocates what was deferred
    net.hybridize(static_alloc=True, static_shape=True)
    return net
