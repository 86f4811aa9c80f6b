"""Compares the layer on shards of a GPU with PyTorch on the whole batch, in float64.

    python tests/gpu/compare_with_pytorch.py FOLDER

FOLDER has what `test_cuda_op FOLDER` wrote: a file for each tensor of each shard.
scripts/check_gpu.sh runs both. It needs NumPy and PyTorch.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import reference

EPS, CHANNELS, STEPS = 1e-5, 5, 2
# Additions in float32 on the way of one term: kFoldEvery rounds of two vectors of four
# lanes each, then the lanes, see src/kernels/cuda/sums.cuh; totals are fewer.
LANE = 2 * 136


def results(folder):
    """Per (function, slope, dtype): data of the whole batch, vectors of each shard."""
    settings = {}
    for path in sorted(Path(folder).iterdir()):
        function, slope, dtype, _, tensor = path.name.split(" ")
        is_data = tensor in ("x", "dy", "y", "dx")
        storage = dtype if is_data or dtype == "float64" else "float32"
        shape = (-1, CHANNELS, 7) if is_data else (1, CHANNELS)
        values = np.fromfile(path, storage).astype(float).reshape(shape)
        tensors = settings.setdefault((function, float(slope), dtype), {})
        shards = [tensors[tensor], values] if tensor in tensors else [values]
        tensors[tensor] = np.concatenate(shards)
    return settings


def of_pytorch(x, dy, gamma, beta, function, slope):
    """y, dx, dgamma and dbeta of the whole batch."""
    import torch
    from torch.nn import functional

    x, gamma, beta = (torch.tensor(v, requires_grad=True) for v in (x, gamma, beta))
    z = functional.batch_norm(x, None, None, gamma, beta, training=True, eps=EPS)
    y = functional.leaky_relu(z, 1.0 if function.startswith("identity") else slope)
    y.backward(torch.tensor(dy))
    return [v.detach().numpy() for v in (y, x.grad, gamma.grad, beta.grad)]


def compare(function, slope, dtype, ours, of_whole_batch=of_pytorch):
    """Raises AssertionError unless ours are within the tolerances of reference.py."""
    x, dy, gamma, beta = ours["x"], ours["dy"], ours["gamma"][0], ours["beta"][0]
    y, dx, dgamma, dbeta = of_whole_batch(x, dy, gamma, beta, function, slope)
    # The sizes of terms, from which tolerances follow.
    inv_std = 1 / np.sqrt(x.var((0, 2)) + EPS)
    mean = x.mean((0, 2))
    x_hat = np.abs((x - mean[:, None]) * inv_std[:, None]).max()
    y_terms = 2 * (np.abs(gamma).max() * x_hat + np.abs(beta).max())
    dx_terms = np.abs(gamma * inv_std).max() * np.abs(dy).max() * (1 + x_hat)
    sum_terms = np.abs(dy).sum((0, 2)).max() * (1 + x_hat) + 1
    of_x_hat = 0.0
    if function in ("leaky_relu", "identity_from_y"):
        of_x_hat = reference.reconstruction_error(dtype, "leaky_relu", x_hat)
    count, conditioning = x.size // CHANNELS, np.max(np.abs(mean) * inv_std)

    def near(result, right, scale, stored, error=0.0):
        bounds = count, conditioning, scale, min(LANE, count)
        rtol, atol = reference.tolerance(stored, *bounds)
        atol = error + max(atol, reference.tolerance(dtype, *bounds)[1])
        np.testing.assert_allclose(result, right, rtol, atol, err_msg=function)

    near(ours["y"], y, y_terms, dtype)
    near(ours["dx"], dx, dx_terms, dtype, 2 * of_x_hat * dx_terms)
    vector, error = "float64" if dtype == "float64" else "float32", of_x_hat * sum_terms
    # dgamma was added to ones in each step; dbeta was overwritten.
    total = (ours["dgamma"] - 1).sum(0) / STEPS
    near(total, dgamma, STEPS * sum_terms, vector, error)
    near(ours["dbeta"].sum(0), dbeta, sum_terms, vector, error)


if __name__ == "__main__":
    compared = results(sys.argv[1])
    assert len(compared) == 12, list(compared)
    for setting, ours in compared.items():
        compare(*setting, ours)
    print(f"the layer equals PyTorch in {len(compared)} settings")
