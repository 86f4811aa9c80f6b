"""A GluonCV segmentation model on some contexts, with MXNet's own BatchNorm.

`engine.py` converts its layers, because some models (ICNet, FastSCNN) make layers that
GluonCV's `norm_layer` and `norm_kwargs` do not reach.
"""

import contextlib
import importlib
import io

import mxnet as mx

from .errors import UserError

# name: (class in gluoncv.model_zoo, weights of the outputs; 'aux' is --aux-weight)
_KINDS = {
    "fastscnn": ("fastscnn.FastSCNN", (1.0,)),  # its auxiliary head is optional
    "fcn": ("fcn.FCN", (1.0, "aux")),
    "pspnet": ("pspnet.PSPNet", (1.0, "aux")),
    "deeplabv3": ("deeplabv3.DeepLabV3", (1.0, "aux")),
    "deeplabv3plus": ("deeplabv3_plus.DeepLabV3Plus", (1.0, "aux")),
    "danet": ("danet.DANet", (1.0, 1.0, 1.0)),
    "icnet": ("icnet.ICNet", (1.0, 0.4, 0.4, 1.0)),
}


def output_weights(config):
    """The weight of each of the net's outputs in the loss; the first predicts."""
    weights = _KINDS[config.model][1]
    return tuple(config.aux_weight if w == "aux" else w for w in weights)


def build_model(config, num_classes, contexts, weights=None):
    """The net on `contexts`, every parameter allocated.

    Parameters
    ----------
    weights : dict of str to numpy.ndarray, optional
        Parameters by structural name; without them they are drawn from `config.seed`.
    """
    mx.random.seed(config.seed)
    pretrained = config.pretrained and weights is None
    net = _construct(config, num_classes, contexts, pretrained)
    _set_multipliers(net, config)
    if not pretrained:
        net.initialize(mx.init.Xavier(magnitude=2), ctx=contexts, force_reinit=True)
    net.collect_params().reset_ctx(contexts)
    side = config.crop_size
    net(mx.nd.zeros((1, 3, side, side), ctx=contexts[0]))  # allocates what was deferred
    if weights is not None:
        set_parameters(net, weights)
    if config.hybridize:
        net.hybridize(static_alloc=True, static_shape=True)
    return net


def _construct(config, num_classes, contexts, pretrained):
    module, kind = _KINDS[config.model][0].split(".")
    options = {"aux": False}
    if config.model != "fastscnn":
        options = {"backbone": config.backbone}
    options.update(crop_size=config.crop_size, ctx=contexts, pretrained_base=pretrained)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its crop size
            module = importlib.import_module(f"gluoncv.model_zoo.{module}")
            return getattr(module, kind)(num_classes, **options)
    except (OSError, RuntimeError) as error:
        if not pretrained:
            raise
        raise UserError(
            f"GluonCV could not get its ImageNet weights of {config.backbone}: {error}."
        ) from None


def _set_multipliers(net, config):
    """Give GluonCV's heads --head-lr-mult, and no decay to gamma, beta, biases."""
    for name, parameter in net.collect_params().items():
        if parameter.lr_mult != 1:
            parameter.lr_mult = config.head_lr_mult
        if name.endswith(("gamma", "beta", "bias")):
            parameter.wd_mult = 0.0


def parameters(net):
    """Parameters by structural name, which is the same with either kind of norm."""
    found = net._collect_params_with_prefix().items()
    return {name: parameter.list_data()[0].asnumpy() for name, parameter in found}


def set_parameters(net, weights):
    """Load parameters by name; other names or shapes mean another model."""
    found = net._collect_params_with_prefix()
    other = sorted(set(found) ^ set(weights)) or sorted(
        name for name in found if found[name].shape != weights[name].shape
    )
    if other:
        raise UserError(
            f"The checkpoint is of another model: its parameter '{other[0]}' does not "
            "fit the net that its settings describe."
        )
    for name, parameter in found.items():
        parameter.set_data(mx.nd.array(weights[name], dtype=parameter.dtype))
