"""The oracle: cases by hand, and its gradients by central differences."""

import numpy as np
import pytest
from support import reference


def test_forward_by_hand():
    x = np.array([[1.0, 10.0], [3.0, 30.0]])
    y, mean, var, inv_std = reference.forward(x, [1.0, 2.0], [0.0, 5.0], axis=1, eps=0)
    np.testing.assert_allclose(mean, [2, 20])
    np.testing.assert_allclose(var, [1, 100])
    np.testing.assert_allclose(inv_std, [1, 0.1])
    np.testing.assert_allclose(y, [[-1, 3], [1, 7]])


def numerical_gradient(loss, values, step=1e-5):
    gradient = np.zeros_like(values)
    for index in np.ndindex(values.shape):
        up, down = values.copy(), values.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (loss(up) - loss(down)) / (2 * step)
    return gradient


RUNNING = np.array([0.3, -0.2, 0.1]), np.array([1.5, 0.7, 2.0])


@pytest.mark.parametrize(
    "forward, backward, statistics",
    [
        (lambda *v, **k: reference.forward(*v, **k)[0], reference.backward, ()),
        (reference.inference_forward, reference.inference_backward, RUNNING),
    ],
    ids=["training", "inference"],
)
def test_backward_is_the_numerical_gradient(forward, backward, statistics):
    rng = np.random.default_rng(1)
    x, dy = rng.normal(size=(2, 4, 3, 2))
    gamma, beta = rng.normal(size=(2, 3))
    dx, dgamma, dbeta = backward(x, dy, gamma, *statistics, axis=1, eps=0.1)

    def loss(x=x, gamma=gamma, beta=beta):
        return np.sum(forward(x, gamma, beta, *statistics, axis=1, eps=0.1) * dy)

    # Central differences: step^2 truncated, 1e-16 / step rounded; both about 1e-10.
    np.testing.assert_allclose(dx, numerical_gradient(loss, x), atol=1e-8)
    of_gamma = numerical_gradient(lambda v: loss(gamma=v), gamma)
    of_beta = numerical_gradient(lambda v: loss(beta=v), beta)
    np.testing.assert_allclose(dgamma, of_gamma, atol=1e-8)
    np.testing.assert_allclose(dbeta, of_beta, atol=1e-8)


def test_tolerances_are_tight():
    assert sum(reference.tolerance("float32", count=100)) < 1e-6
    assert sum(reference.tolerance("float64", count=100)) < 1e-12
