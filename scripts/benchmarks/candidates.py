"""The layers that benchmarks time, by themselves and inside of nets.

Called by benchmark_layer.py and benchmark_sizes.py. Layers, their verification and turns
are those of `python -m gluon_syncbn --bench`.
"""

import os

import benchmarking
from mxnet import gluon

from gluon_syncbn.tools.bench import LAYERS, Candidate

try:
    import torch
except ImportError:
    torch = None


class Identity(gluon.HybridBlock):
    """Copies its input."""

    def hybrid_forward(self, F, x):
        return F.identity(x)


def convolution(channels):
    """A cheap convolution that changes nothing."""
    return gluon.nn.Conv2D(
        channels, 1, groups=channels, use_bias=False, weight_initializer="ones"
    )


# The operators before and after the layer, for its number of channels.
SURROUNDINGS = {"inside": lambda channels: Identity(), "convolutions": convolution}


def make(name, place, mode, devices, x, dy, axis=1):
    """A layer on a batch, alone or surrounded; for the name None there is no layer."""
    layers = []
    if name is not None:
        other_axis = () if axis == 1 else (axis,)  # the contrib layer knows none
        layers = [LAYERS[name](len(devices), *other_axis)]
    if place == "alone":
        (net,) = layers
    else:
        before, after = (SURROUNDINGS[place](x.shape[axis]) for _ in range(2))
        net = gluon.nn.HybridSequential()
        net.add(before, *layers, after)
    benchmarking.set_mode(net, mode)
    return Candidate(net, devices, x, dy)


class TorchCandidate:
    """PyTorch's BatchNorm2d on a batch."""

    def __init__(self, x, dy, axis=1):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self._layer = torch.nn.BatchNorm2d(x.shape[axis])
        self._last = axis == 3
        self._x, self._dy = (self._channels_first(array) for array in (x, dy))
        self._x.requires_grad_()

    def _channels_first(self, array):
        tensor = torch.from_numpy(array)
        return tensor.permute(0, 3, 1, 2) if self._last else tensor

    def forward(self):
        self._x.grad = None
        self._y = self._layer(self._x)

    def backward(self):
        self._y.backward(self._dy)

    def step(self):
        self.forward()
        self.backward()

    def results(self):
        """y and dx of the last step."""
        tensors = self._y.detach(), self._x.grad
        order = (0, 2, 3, 1) if self._last else (0, 1, 2, 3)
        return [tensor.permute(order).numpy() for tensor in tensors]
