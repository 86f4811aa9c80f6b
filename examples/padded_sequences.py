"""Normalize sequences of different lengths over their valid steps only.

    python examples/padded_sequences.py

make_parallel splits a batch of padded sequences (N, T, C) by sequences, so a device may
have few valid steps, or none. The layer takes a mask of the valid steps. It computes
statistics and gradients over the valid steps on all devices. It returns 0 at padding.
"""

import gluon_syncbn  # before mxnet: restores aliases that NumPy has removed

import mxnet as mx
import numpy as np
from mxnet import autograd

LENGTHS = np.array([9, 1, 4, 2, 7])


def mask_of(lengths, steps):
    """Return an array (N, T) with 1 for valid steps and 0 for padding."""
    ones = mx.nd.ones((steps, len(lengths)))
    lengths = mx.nd.array(lengths)
    return mx.nd.SequenceMask(ones, lengths, use_sequence_length=True).T


def reference(rows, dy, epsilon=1e-5):
    """Return y and dx of the rows (count, C) of all valid steps, in float64."""
    inv_std = 1 / np.sqrt(rows.var(0) + epsilon)
    x_hat = (rows - rows.mean(0)) * inv_std
    return x_hat, (dy - dy.mean(0) - x_hat * (dy * x_hat).mean(0)) * inv_std


def main():
    rng = np.random.default_rng(0)
    x, dy = rng.normal(3, 2, (2, len(LENGTHS), max(LENGTHS), 4))
    mask = mask_of(LENGTHS, x.shape[1])
    layer = gluon_syncbn.SyncBatchNorm(axis=-1, in_channels=4)
    layer.cast("float64")
    net = gluon_syncbn.make_parallel(layer, ctx=[mx.cpu(0), mx.cpu(1)])
    net.initialize()
    data = mx.nd.array(x, dtype="float64")
    data.attach_grad()
    with autograd.record():
        y = net(data, mask)
    y.backward(mx.nd.array(dy, dtype="float64"))
    valid = mask.asnumpy() == 1
    expected = reference(x[valid], dy[valid])
    for name, result, right in zip(("y", "dx"), (y, data.grad), expected):
        error = abs(result.asnumpy()[valid] - right).max()
        print(f"{name} differs from the result without padding by {error:.1e}")


if __name__ == "__main__":
    main()
