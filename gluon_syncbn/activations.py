"""The activations that a SyncBatchNorm can have, and MXNet's own blocks of them.

Called by ``batch_norm.py``, ``convert.py`` and ``fusion.py``. What backward reads for
each is the operator's, see src/op/reconstruction.h.
"""

import math

from mxnet.gluon import nn

from ._arguments import check_real, shown

# With the slope of each that has one, if none is given.
DEFAULT_SLOPES = {
    None: None,
    "identity": None,
    "relu": None,
    "leaky_relu": 0.01,
    "elu": 1.0,
}


def checked_slope(activation, slope):
    """The slope to use; TypeError or ValueError for a bad activation or slope."""
    if not isinstance(activation, (str, type(None))) or (
        activation not in DEFAULT_SLOPES
    ):
        raise ValueError(
            "activation is None, 'identity', 'relu', 'leaky_relu' or 'elu', but got "
            f"{shown(activation)}"
        )
    default = DEFAULT_SLOPES[activation]
    if slope is None:
        return default
    if default is None:
        raise ValueError(
            f"slope is for 'leaky_relu' and 'elu', but got {shown(slope)} with "
            f"activation={activation!r}"
        )
    return check_real(
        "slope", slope, "a positive number", lambda value: 0 < value < math.inf
    )


def of_block(block):
    """(activation, slope) of one of MXNet's blocks; None for another block."""
    kind = type(block)
    if kind is nn.Activation and block._act_type == "relu":
        return "relu", None
    if kind is nn.LeakyReLU:
        return ("leaky_relu", block._alpha) if block._alpha > 0 else ("relu", None)
    if kind is nn.ELU and block._alpha > 0:
        return "elu", block._alpha
    return None


def apply(F, z, activation, slope):
    """The activation by MXNet's own operators."""
    if activation == "relu":
        return F.relu(z)
    if activation == "leaky_relu":
        return F.LeakyReLU(z, act_type="leaky", slope=slope)
    if activation == "elu":
        return F.LeakyReLU(z, act_type="elu", slope=slope)
    return z


class ActivatedBatchNorm(nn.BatchNorm):
    """What a SyncBatchNorm that was made with an activation is reverted to."""

    def hybrid_forward(self, F, x, **parameters):
        y = super().hybrid_forward(F, x, **parameters)
        return apply(F, y, self._activation, self._slope)
