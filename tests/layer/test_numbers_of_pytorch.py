"""Numbers of PyTorch 2.14: BatchNorm1d in float64, and an activation, on all rows."""

from gluon_syncbn import SyncBatchNorm, make_parallel

import numpy as np
import pytest
from mxnet import autograd
from support.helpers import MODES, cpus, ready, set_mode
from support.nd import nd

X = np.array([[1, -2], [0.5, 3], [2, 1], [-1, 0.25]])  # rows, channels
DY = np.array([[1, 0.5], [-1, 2], [0.25, -0.5], [2, 1]])
STATE = [1.5, -0.5], [0.25, 1], [0.5, -1], [2, 0.5]  # gamma, beta, mean, variance
# Options, then PyTorch's y, dx, dgamma, dbeta, running mean and running variance.
TABLE = [
    (
        {},
        "0.7696130253 1.716326852 0.07679565825 0.3186159211 2.155247759 "
        "0.8777002935 -2.001656443 1.087356933",
        "0.8729476063 -0.101542566 -2.253965075 -0.1863619672 0.545007983 "
        "0.3786959471 0.836009486 -0.09079141394",
        "-2.222789053 1.712195891",
        "2.25 3",
        "0.5125 -0.84375",
        "1.95625 0.8765625",
    ),
    (
        {"scale": False, "center": False},
        "0.3464086835 -1.432653704 -0.1154695612 1.362768158 1.270165173 "
        "0.244599413 -1.501104295 -0.1747138664",
        "0.5819650709 0.203085132 -1.502643384 0.3727239344 0.3633386553 "
        "-0.7573918943 0.5573396574 0.1815828279",
        None,
        None,
        "0.5125 -0.84375",
        "1.95625 0.8765625",
    ),
    (
        {"momentum": 0.7, "epsilon": 0.01},
        "0.767412306 1.715211054 0.07752923132 0.3196772904 2.147178456 "
        "0.8778907957 -1.992119993 1.08722086",
        "0.8670053554 -0.100851588 -2.243670497 -0.1865784953 0.5344678501 "
        "0.3780150977 0.8421972914 -0.09058501452",
        "-2.213374865 1.70952886",
        "2.25 3",
        "0.5375 -0.53125",
        "1.86875 1.6296875",
    ),
    (
        {"activation": "relu"},
        "0.7696130253 1.716326852 0.07679565825 0.3186159211 2.155247759 "
        "0.8777002935 0 1.087356933",
        "1.205503017 -0.101542566 -1.441060389 -0.1863619672 -0.08313515761 "
        "0.3786959471 0.3186925303 -0.09079141394",
        "0.7794195379 1.712195891",
        "0.25 3",
        "0.5125 -0.84375",
        "1.95625 0.8765625",
    ),
    (
        {"activation": "leaky_relu", "slope": 0.2},
        "0.7696130253 1.716326852 0.07679565825 0.3186159211 2.155247759 "
        "0.8777002935 -0.4003312886 1.087356933",
        "1.138991935 -0.101542566 -1.603641327 -0.1863619672 0.04249347051 "
        "0.3786959471 0.4221559215 -0.09079141394",
        "0.1789778198 1.712195891",
        "0.65 3",
        "0.5125 -0.84375",
        "1.95625 0.8765625",
    ),
    (
        {"use_global_stats": True},
        "0.7803287601 1.70709971 0.25 -1.828398841 1.84098628 "
        "-0.4141994204 -1.34098628 0.1161253622",
        "1.06065752 -0.3535498551 -1.06065752 -1.41419942 0.26516438 "
        "0.3535498551 2.12131504 -0.7070997102",
        "-1.502598154 10.96004551",
        "2.25 3",
        "0.5 -1",
        "2 0.5",
    ),
]
# Errors of 32 roundings of numbers below 11, and of the rounding of the table.
ERRORS = {"float32": 32 * 11 * 2**-24, "float64": 1e-8}


@pytest.mark.parametrize("shape, axis", [((4, 2, 1), 1), ((4, 1, 2), 2)])
@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row", TABLE)
def test_equals_pytorch(row, mode, dtype, shape, axis):
    options, *expected = row
    options = {"in_channels": 2, "unbiased_running_var": True, **options}
    layer = SyncBatchNorm(axis=axis, **options)
    layer.cast(dtype)
    net = set_mode(ready(make_parallel(layer, cpus(2))), mode)
    learned = [layer.gamma, layer.beta] if layer.gamma.grad_req != "null" else []
    running = [layer.running_mean, layer.running_var]
    for parameter, values in zip((*learned, *running), STATE[-2 - len(learned) :]):
        parameter.set_data(nd.array(values, dtype=dtype))
    x, dy = (nd.array(array.reshape(shape), dtype=dtype) for array in (X, DY))
    x.attach_grad()
    with autograd.record():
        y = net(x)
    y.backward(dy)
    found = [y, x.grad, *(p.grad() for p in learned), *(p.data() for p in running)]
    for result, numbers in zip(found, filter(None, expected)):
        numbers = np.array(numbers.split(), float)
        np.testing.assert_allclose(result.asnumpy().ravel(), numbers, 0, ERRORS[dtype])
