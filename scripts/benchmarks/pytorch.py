"""PyTorch's layer as a candidate of benchmark_layer.py and benchmark_sizes.py."""

import os

try:
    import torch
except ImportError:
    torch = None


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
