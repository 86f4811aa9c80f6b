"""Compares the layer on shards of a GPU with PyTorch on the whole batch, in float64.

    python tests/gpu/compare_with_pytorch.py FOLDER

FOLDER has what `test_cuda_op FOLDER` has written: a file for each tensor of each shard.
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
    """Per setting, its tensors by name: data of the whole batch, vectors of shards."""
    settings = {}
    for path in sorted(Path(folder).iterdir()):
        *setting, dtype, _, tensor = path.name.split(" ")
        of_data = tensor in ("x", "dy", "y", "dx")
        storage = dtype if of_data or dtype == "float64" else "float32"
        values = np.fromfile(path, storage).astype(float)
        shape = (-1, CHANNELS, 7) if of_data else (1, CHANNELS)
        shards = settings.setdefault((*setting, dtype), {}).setdefault(tensor, [])
        shards.append(values.reshape(shape))
    for key, tensors in settings.items():
        yield key, {name: np.concatenate(shards) for name, shards in tensors.items()}


def of_pytorch(x, dy, gamma, beta, function, slope):
    """y, dx, dgamma and dbeta of the whole batch."""
    import torch
    from torch.nn import functional

    x, gamma, beta = (torch.tensor(v, requires_grad=True) for v in (x, gamma, beta))
    z = functional.batch_norm(x, None, None, gamma, beta, training=True, eps=EPS)
    if function == "elu":
        y = functional.elu(z, slope)
    else:
        y = z if function == "identity" else functional.leaky_relu(z, slope)
    y.backward(torch.tensor(dy))
    return [v.detach().numpy() for v in (y, x.grad, gamma.grad, beta.grad)]


def compare(setting, ours, of_whole_batch=of_pytorch):
    """Raises AssertionError unless ours are within the tolerances of reference.py."""
    function, slope, dtype = setting[0], float(setting[-2]), setting[-1]
    gamma, beta = ours["gamma"][0], ours["beta"][0]
    x, dy = ours["x"], ours["dy"]
    y, dx, dgamma, dbeta = of_whole_batch(x, dy, gamma, beta, function, slope)
    x_hat = np.abs(reference.forward(x, np.ones(CHANNELS), np.zeros(CHANNELS), 1, EPS)[0])
    inv_std = 1 / np.sqrt(x.var((0, 2)) + EPS)
    y_terms = 2 * (np.abs(gamma).max() * x_hat.max() + np.abs(beta).max())
    dx_terms = np.abs(gamma * inv_std).max() * np.abs(dy).max() * (1 + x_hat.max())
    sum_terms = np.abs(dy).sum((0, 2)).max() * (1 + x_hat.max()) + 1
    of_x_hat = 0.0
    if function == "leaky_relu" or setting[0] == "identity" and len(setting) > 3:
        of_x_hat = reference.reconstruction_error(dtype, "leaky_relu", x_hat.max())
    count, conditioning = x.size // CHANNELS, reference.conditioning(x, 1, EPS)
    lane = min(LANE, count)

    def near(result, right, scale, error, stored=dtype):
        bounds = count, conditioning, scale, lane
        rtol, atol = reference.tolerance(stored, *bounds)
        atol = max(atol, reference.tolerance(dtype, *bounds)[1])
        np.testing.assert_allclose(result, right, rtol, atol + error, err_msg=setting)

    near(ours["y"], y, y_terms, 0)
    near(ours["dx"], dx, dx_terms, 2 * of_x_hat * dx_terms)
    vector = "float64" if dtype == "float64" else "float32"
    # dgamma was added to ones in each step; dbeta was overwritten.
    total = (ours["dgamma"] - 1).sum(0) / STEPS
    near(total, dgamma, STEPS * sum_terms, of_x_hat * sum_terms, vector)
    near(ours["dbeta"].sum(0), dbeta, sum_terms, of_x_hat * sum_terms, vector)


if __name__ == "__main__":
    compared = [setting for setting, ours in results(sys.argv[1]) if not compare(setting, ours)]
    assert len(compared) == 15, compared
    print(f"the layer equals PyTorch in {len(compared)} settings")
