"""Bad contexts, batches, outputs and losses of parallel nets: one sentence each."""

from gluon_syncbn import make_parallel

import mxnet as mx
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from support.blocks import by_gluon, prefixed
from support.nd import nd
from support.parallel_nets import column, dense, weight_gradient


def test_net_on_other_contexts(devices):
    net = nn.Dense(1, **prefixed("mine_"))
    net.initialize(ctx=mx.cpu(3))
    expected = r"'.* cpu\(3\).* cpu\(0\), cpu\(1\)"
    expected = by_gluon("'mine_weight", "'weight") + expected
    with pytest.raises(ValueError, match=expected):
        make_parallel(net, devices.contexts)
    assert "forward" not in vars(net)
    parallel = make_parallel(nn.Dense(1), devices.contexts)
    parallel.initialize(ctx=mx.cpu(0))
    with pytest.raises(ValueError, match=r"cpu\(0\).* cpu\(0\), cpu\(1\)"):
        parallel(nd.ones((2, 2)))


def test_net_called_by_one_that_is_parallel_over_others(devices, make_devices):
    inner, x = dense(make_devices(1, first=1).contexts, 2.0), column(1, 2)
    outer = nn.Sequential()
    outer.add(nn.Lambda(lambda x: inner(x)))
    make_parallel(outer, devices.contexts)
    with pytest.raises(ValueError, match="parallel"):
        with autograd.record():
            outer(x)
    assert (outer(x).asnumpy()[:, 0] == [2, 4]).all()  # nothing is recorded


@pytest.mark.parametrize("rows, dtype", [(3, "float32"), (2, "float64")])
def test_head_gradient_of_another_form(rows, dtype, devices):
    net, x = dense(devices.contexts), column(1, 2)
    with autograd.record():
        y = net(x)
    words = rf"head 0.*\({rows}, 1\).*{dtype}.*\(2, 1\).*float32"
    gradient = nd.ones((rows, 1), dtype=dtype)
    with pytest.raises(ValueError, match=words):
        y.backward(gradient)
    with pytest.raises(ValueError, match=words.replace("head 0", "head 1")):
        autograd.backward([y, y], [None, gradient])
    y.backward(nd.ones((2, 1)))
    assert weight_gradient(net) == 3


# How an array of one number has its shape, and the name of an array's class.
ONE, KIND = by_gluon(("1,", "NDArray"), ("", "ndarray"))


@pytest.mark.parametrize(
    "outputs, words",
    [
        (lambda x: [x.mean()] * 2, rf"\({ONE}\).*cpu\(0\).*2 rows"),
        (lambda x: ([x], [x, x]), rf"{KIND} float32 \(\*, 1\).*cpu\(1\)"),
        (lambda x: (x, None), rf"{KIND} float32 \(\*, 1\).*NoneType"),
        (lambda x: ({"a": x, "b": x}, {"b": x, "a": x}), r"\['b', 'a'\]|cpu\(1\)"),
        (lambda x: (x, x.tile((1, 2))), r"\(\*, 1\).*\(\*, 2\)"),
        (lambda x: (x, x.astype("float64")), rf"float32.*{KIND} float64"),
    ],
)
def test_outputs_that_cannot_be_joined(outputs, words, devices):
    net = nn.Lambda(lambda x: outputs(x)[x.context.device_id])
    net, x = make_parallel(net, devices.contexts), column(1, 2, 3)
    with pytest.raises(ValueError, match=words), autograd.record():
        net(x)
