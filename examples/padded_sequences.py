"""Normalizes sequences of different lengths over their valid steps only.

    python examples/padded_sequences.py

A batch of padded sequences (N, T, C) is split by sequences, so devices hold different
numbers of valid steps. Each selects its valid rows, the layer normalizes them over all
devices (uneven shards are exact), and they are put back; padding stays zero.
"""

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import Block

import gluon_syncbn

LENGTHS = np.array([9, 1, 4, 2, 7])


class SequenceNorm(Block):
    """Batch normalization of the valid steps of padded sequences."""

    def __init__(self, num_devices, **kwargs):
        super().__init__()
        with self.name_scope():
            self.norm = gluon_syncbn.SyncBatchNorm(num_devices=num_devices, **kwargs)

    def forward(self, x, valid):
        """x: (N, T, C); valid: numbers n * T + t of the valid steps, at least one."""
        rows = x.reshape((-1, x.shape[2]))
        selected = self.norm(rows.take(valid))
        put_back = mx.nd.contrib.index_copy(rows.zeros_like(), valid, selected)
        return put_back.reshape(x.shape)


def valid_steps(lengths, steps):
    """The argument `valid` for sequences of these lengths, padded to `steps`."""
    return np.flatnonzero(np.arange(steps) < lengths[:, None]).astype("int64")


def normalize(layer, devices, x, lengths, dy):
    """y and dx of padded sequences, as NumPy arrays."""
    xs, dys = devices.split(x), devices.split(dy)
    bounds = np.cumsum([len(shard) for shard in xs])[:-1]
    valid = [
        mx.nd.array(valid_steps(part, x.shape[1]), ctx=context, dtype="int64")
        for part, context in zip(np.split(lengths, bounds), devices.contexts)
    ]
    for shard in xs:
        shard.attach_grad()
    with autograd.record():
        ys = devices.map(layer, xs, valid)
    devices.map(lambda y, dy: y.backward(dy), ys, dys)
    return [
        np.concatenate([array.asnumpy() for array in arrays])
        for arrays in (ys, [shard.grad for shard in xs])
    ]


def reference(rows, dy, epsilon=1e-5):
    """y and dx of the rows (count, C) of all sequences without padding, in float64."""
    inv_std = 1 / np.sqrt(rows.var(0) + epsilon)
    x_hat = (rows - rows.mean(0)) * inv_std
    return x_hat, (dy - dy.mean(0) - x_hat * (dy * x_hat).mean(0)) * inv_std


def main():
    rng = np.random.default_rng(0)
    x, dy = rng.normal(3, 2, (2, len(LENGTHS), max(LENGTHS), 4))
    with gluon_syncbn.Devices([mx.cpu(0), mx.cpu(1)]) as devices:
        layer = SequenceNorm(len(devices), in_channels=4)
        layer.cast("float64")
        layer.initialize(ctx=devices.contexts)
        y, dx = normalize(layer, devices, x, LENGTHS, dy)
    valid = valid_steps(LENGTHS, x.shape[1])
    rows = [array.reshape(-1, 4)[valid] for array in (x, dy, y, dx)]
    expected = reference(*rows[:2])
    for name, result, right in zip(("y", "dx"), rows[2:], expected):
        error = abs(result - right).max()
        print(f"{name} differs from that of the unpadded rows by {error:.1e}")


if __name__ == "__main__":
    main()
