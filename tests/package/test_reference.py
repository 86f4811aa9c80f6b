"""The oracle: a case by hand, invariants, gradients by central differences."""

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


def test_backward_by_hand():
    # With two values x_hat is always -1 and 1, so x cannot matter to the loss.
    x = np.array([[1.0], [3.0]])
    dx, dgamma, dbeta = reference.backward(x, [[2.0], [5.0]], [1.0], axis=1, eps=0)
    np.testing.assert_allclose(dx, [[0], [0]], atol=1e-15)
    np.testing.assert_allclose(dgamma, [3])
    np.testing.assert_allclose(dbeta, [7])


def test_mean_far_from_zero():
    values = np.array([-1.0, 1.0, -1.0, 1.0]).reshape(4, 1)
    y, mean, var, _ = reference.forward(values + 2.0**30, [1.0], [0.0], eps=0)
    assert mean[0] == 2.0**30 and var[0] == 1
    np.testing.assert_array_equal(y, values)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_axis_is_only_a_transposition(axis):
    x = np.random.default_rng(0).normal(size=(4, 3, 5))
    channels = x.shape[axis]
    gamma, beta = np.arange(1.0, channels + 1), np.arange(channels)
    y = reference.forward(x, gamma, beta, axis=axis)[0]
    moved = reference.forward(np.moveaxis(x, axis, 1), gamma, beta, axis=1)[0]
    np.testing.assert_allclose(np.moveaxis(y, axis, 1), moved, rtol=1e-13)


def _numerical_gradient(loss, values, step=1e-5):
    gradient = np.zeros_like(values)
    for index in np.ndindex(values.shape):
        up, down = values.copy(), values.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (loss(up) - loss(down)) / (2 * step)
    return gradient


def _training(x, gamma, beta):
    return reference.forward(x, gamma, beta, axis=1, eps=0.1)[0]


def _training_backward(x, dy, gamma):
    return reference.backward(x, dy, gamma, axis=1, eps=0.1)


_RUNNING = np.array([0.3, -0.2, 0.1]), np.array([1.5, 0.7, 2.0])


def _inference(x, gamma, beta):
    return reference.inference_forward(x, gamma, beta, *_RUNNING, axis=1, eps=0.1)


def _inference_backward(x, dy, gamma):
    return reference.inference_backward(x, dy, gamma, *_RUNNING, axis=1, eps=0.1)


@pytest.mark.parametrize(
    "run, run_backward",
    [(_training, _training_backward), (_inference, _inference_backward)],
    ids=["training", "inference"],
)
def test_backward_is_the_numerical_gradient(run, run_backward):
    rng = np.random.default_rng(1)
    x, dy = rng.normal(size=(2, 4, 3, 2))
    gamma, beta = rng.normal(size=(2, 3))
    dx, dgamma, dbeta = run_backward(x, dy, gamma)

    def loss(x=x, gamma=gamma, beta=beta):
        return np.sum(run(x, gamma, beta) * dy)

    # Central differences: step^2 truncated, 1e-16 / step rounded; both about 1e-10.
    np.testing.assert_allclose(dx, _numerical_gradient(loss, x), atol=1e-8)
    of_gamma = _numerical_gradient(lambda v: loss(gamma=v), gamma)
    of_beta = _numerical_gradient(lambda v: loss(beta=v), beta)
    np.testing.assert_allclose(dgamma, of_gamma, atol=1e-8)
    np.testing.assert_allclose(dbeta, of_beta, atol=1e-8)


def test_running_statistics():
    assert reference.update_running(10.0, 20.0, 0.9) == pytest.approx(11)
    unbiased = reference.update_running(0.0, 3.0, 0.0, unbiased=True, count=4)
    assert unbiased == pytest.approx(4)
    running = 0.0
    for step, value in enumerate([2.0, 4.0, 9.0], start=1):
        running = reference.update_running(running, value, None, step=step)
    assert running == pytest.approx(5)


def test_tolerance_grows_with_what_it_depends_on():
    rtol, atol = reference.tolerance("float32", count=100)
    assert reference.tolerance("float16", count=100)[0] > rtol
    assert reference.tolerance("float32", count=10**9)[1] > atol
    assert reference.tolerance("float32", count=100, conditioning=1e9)[1] > atol
    assert reference.tolerance("float32", count=100, scale=2.0)[1] > atol
    assert rtol + atol < 1e-6  # tight enough to mean something


def test_conditioning():
    x = np.array([[99.0, 1.0], [101.0, -1.0]])
    assert reference.conditioning(x, eps=0) == pytest.approx(100)
