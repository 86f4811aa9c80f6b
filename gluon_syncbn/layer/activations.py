"""The activations that a SyncBatchNorm can have.

src/c_api/python_api.cc decides what backward reads for each.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import mxnet as mx
from mxnet.gluon import nn

from ..common.arguments import check_choice, check_real, short_repr
from ..common.mxnet_version import IS_GLUON_2


class Activation(NamedTuple):
    """An activation's name, and its slope if it has one; no name means none."""

    name: str | None = None
    slope: float | None = None


NONE, RELU = Activation(), Activation("relu")

NAMES = None, "identity", "relu", "leaky_relu"  # in the order of native code


def validate(activation: str | None, slope: float | None) -> Activation:
    """The Activation; TypeError or ValueError for a bad name or slope."""
    if activation == "elu" or isinstance(activation, nn.ELU):
        raise ValueError(
            "activation is None, 'identity', 'relu' or 'leaky_relu', but got "
            f"{short_repr(activation)}: an ELU is a layer of its own after this one"
        )
    is_leaky = check_choice("activation", activation, NAMES) == "leaky_relu"
    if slope is None:
        return Activation(activation, 0.01 if is_leaky else None)
    if not is_leaky:
        raise ValueError(
            f"slope is for 'leaky_relu', but got {short_repr(slope)} with "
            f"activation={activation!r}"
        )
    slope = check_real("slope", slope, "a positive number", lambda v: 0 < v < math.inf)
    return Activation(activation, slope)


def apply(F: Any, z: Any, activation: Activation) -> Any:
    """Applies an Activation with MXNet's own operators."""
    name, slope = activation
    if name == "relu":
        return F.relu(z)
    if name == "leaky_relu":
        return F.LeakyReLU(z, act_type="leaky", slope=slope)
    return z


class ActivatedBatchNorm(nn.BatchNorm):
    """A BatchNorm with an activation: a reverted SyncBatchNorm that has one."""

    def _forward_gluon_1(self, F: Any, x: Any, **parameters: Any) -> Any:
        y = super().hybrid_forward(F, x, **parameters)
        return apply(F, y, self._applied)

    def _forward_gluon_2(self, x: Any) -> Any:
        y = super().forward(x).as_nd_ndarray()
        return apply(mx.nd, y, self._applied).as_np_ndarray()

    if IS_GLUON_2:
        forward = _forward_gluon_2
    else:
        hybrid_forward = _forward_gluon_1
