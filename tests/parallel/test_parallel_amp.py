"""make_parallel under contrib.amp, which changes the operators of a whole process."""

from support.helpers import output_of

# Small whole numbers, which bfloat16 holds exactly: results have to be the same bits.
PROGRAM = """
import itertools
import mxnet as mx
import numpy as np
from support import reference
from support.helpers import assert_near
from mxnet import autograd
from mxnet.contrib import amp
from mxnet.gluon import loss, nn

amp.init(target_dtype="bfloat16")
import gluon_syncbn

contexts = [mx.cpu(0), mx.cpu(1)]
rng = np.random.default_rng(0)
x = mx.nd.array(rng.integers(-1, 2, (5, 2, 2, 2)))
label = mx.nd.array(rng.integers(-1, 2, (5, 2)) + 0.5)

def make(*layers):
    net = nn.HybridSequential()
    net.add(*layers)
    net.initialize(ctx=contexts)
    for p in net.collect_params(".*weight").values():
        p.set_data(mx.nd.array(np.random.default_rng(1).integers(-1, 2, p.shape)))
    return net

def numbers(array):
    return mx.nd.amp_cast(array, dtype="float32").asnumpy()

def results(is_parallel, hybridize, sync_bn, gather, attach):
    net = make(nn.Conv2D(2, 1, in_channels=2), nn.Dense(2, in_units=8))
    criterion = loss.L1Loss()
    if is_parallel:
        net = gluon_syncbn.make_parallel(net, contexts, sync_bn, gather=gather)
        if not gather:
            criterion = gluon_syncbn.ParallelCriterion(criterion, net)
    net.hybridize(hybridize)
    if attach:
        x.attach_grad()
    with autograd.record():
        y = net(x)
        total = criterion(y, label)
    total.backward()
    yield total.asnumpy()
    if gather:
        assert y.dtype.names == ("bfloat16",), y.dtype
        yield numbers(y)
    if attach:
        yield x.grad.asnumpy()
    for p in net.collect_params().values():
        yield sum(g.asnumpy() for g in p.list_grad()[: 1 + is_parallel])

for options in itertools.product([True, False], repeat=4):
    pairs = list(zip(results(True, *options), results(False, *options)))
    assert len(pairs) >= 5
    for result, expected in pairs:
        assert abs(expected).max() > 0 and (result == expected).all(), options

template = make(nn.Dense(3, in_units=8), nn.BatchNorm(in_channels=3))
net = gluon_syncbn.make_parallel(template, contexts)
with autograd.pause(train_mode=True):
    z, y = numbers(template[0](x)), numbers(net(x))
right = reference.forward(z, np.ones(3), np.zeros(3))[0]
assert_near(y, right, count=5, scale=abs(right).max())
print("equal")
"""


def test_bfloat16():
    assert output_of(PROGRAM) == "equal\n"
