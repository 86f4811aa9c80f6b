"""A process's memory does not grow, and layers keep inputs only while they must."""

import json

import pytest
from support.helpers import output_of

SETUP = """
import json, sys
import gluon_syncbn
import mxnet as mx, numpy as np
from mxnet import autograd
from mxnet.gluon import nn
from support.helpers import ready
from support.nd import nd

steps = int(sys.argv[1])
devices = gluon_syncbn.Devices([mx.cpu(0), mx.cpu(1)])
"""

TRAIN = """
from support.helpers import differentiate, status

net = nn.HybridSequential()
net.add(nn.Conv2D(16, 3, padding=1), nn.BatchNorm(), nn.Dropout(0.3))
# gamma starts at 0, so forward keeps the input of this layer for backward
net.add(gluon_syncbn.SyncBatchNorm(activation='leaky_relu', gamma_initializer='zeros'))
net.add(nn.Conv2D(8, 3, padding=1))
net = ready(gluon_syncbn.make_parallel(net, devices.contexts))
net.hybridize()
trainer = mx.gluon.Trainer(net.collect_params(), 'sgd', {'learning_rate': 1e-4})
shapes = [(4, 3, 8, 8), (3, 3, 9, 7), (6, 3, 5, 12), (2, 3, 16, 16), (1, 3, 8, 8)]
batches = [nd.random.normal(shape=shape) for shape in shapes]

used = []
for number in range(1, steps + 1):
    x = batches[number % len(batches)].copy()
    x.attach_grad()
    total = differentiate(lambda x: (net(x) ** 2).mean(), x)
    trainer.step(1)
    if number % 10 == 0:
        assert np.isfinite(total.asnumpy())
    if number % (steps // 2) == 0:
        mx.nd.waitall()
        used.append((status('VmRSS'), status('Threads')))
print(json.dumps(used))
"""

KEPT_INPUTS = """
from support.blocks import Same
from support.helpers import differentiate, set_mode, status

layer = gluon_syncbn.SyncBatchNorm(num_devices=1, in_channels=8, activation='identity')
layer.initialize()
net = nn.HybridSequential()
net.add(Same(), layer, Same())
set_mode(net, 'static_shape')
x = nd.ones((8, 8, 512, 256))
x[:4] = 0  # if all values were equal, the layer would keep x for any gamma

def resident(gamma):
    layer.gamma.set_data(nd.full(8, gamma))
    for _ in range(3):
        x.attach_grad()
        y = differentiate(net, x)
        mx.nd.waitall()
    del y
    return status('VmRSS')

print(json.dumps([resident(0.0), resident(1.0)]))
"""

FREED = """
from support.helpers import status
layer = ready(gluon_syncbn.SyncBatchNorm(num_devices=1))
with autograd.train_mode():
    layer(nd.ones((2, 3))).wait_to_read()
other = np.ones(2**24)  # 128 MB
before = status('VmRSS')
del other
print(before - status('VmRSS'))
"""

KEEP_FREED_MEMORY = {"GLUON_SYNCBN_KEEP_MEMORY": "1"}


def result_of(program, steps, **options):
    """Return the JSON that a program prints."""
    return json.loads(output_of(SETUP + program, steps, **options))


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "steps, variables",
    [(1000, {}), pytest.param(5000, KEEP_FREED_MEMORY, marks=pytest.mark.full)],
)
def test_memory_and_threads_do_not_grow_when_shapes_change(steps, variables):
    used = result_of(TRAIN, steps, timeout=270, **variables)
    (memory, threads), (later_memory, later_threads) = used
    assert later_memory - memory < 16 * 1024, used
    assert later_threads <= threads + 1, used


def test_inputs_are_kept_only_while_gamma_is_0():
    with_zero, with_one = result_of(KEPT_INPUTS, 1, timeout=120)
    assert with_zero - with_one > 28 * 1024  # x of 32 MB


@pytest.mark.parametrize("variables", [{}, KEEP_FREED_MEMORY])
def test_memory_of_others_is_returned_unless_the_program_asks(variables):
    returned = result_of(FREED, 1, **variables)
    assert (returned > 64 * 1024) == (not variables)
