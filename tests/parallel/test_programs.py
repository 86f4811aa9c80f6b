"""Plain loops and trainers give on several devices the results of one device."""

from functools import partial

from gluon_syncbn import (
    allow_plain_loop,
    check_replicas,
    convert_sync_batchnorm,
    make_parallel,
    revert_parallel,
)

import mxnet as mx
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import Trainer
from support.blocks import move
from support.helpers import (
    MODES,
    cpus,
    differentiate,
    run_python,
    set_mode,
    summed_grad,
    value,
)
from support.nets import (
    Net,
    Normalized,
    X,
    array,
    assert_same,
    dense,
    parameters_of,
    started,
    state_of,
)


@pytest.mark.parametrize("mode", MODES)
def test_plain_loop_whose_loss_reads_inputs_and_parameters(mode):
    """The net is called twice; the second step has one backward for each context."""
    results = []
    for contexts in cpus(2), cpus(1):
        net = started(Normalized(function=lambda F, h: (h, [h])), None)
        move(net, contexts)
        if len(contexts) > 1:
            allow_plain_loop(convert_sync_batchnorm(net))
        set_mode(net, mode)
        for is_together in True, False:
            losses = []
            with autograd.record():
                for x in gluon.utils.split_and_load(array(X), contexts):
                    y, (again,) = net(x)
                    loss = ((y - x) ** 2).sum() + (again * net(x)[0]).sum()
                    for p in parameters_of(net):
                        loss = loss + (p.data(x.context) ** 2).sum() / len(contexts)
                    losses.append(loss)
            for heads in [losses] if is_together else [[loss] for loss in losses]:
                autograd.backward(heads)
        total = sum(loss.asnumpy() for loss in losses)
        results.append([total, *map(summed_grad, parameters_of(net))])
    assert_same(*results)


@pytest.mark.parametrize("kind", ["chain", "own target"])
def test_plain_loop_of_converted_nets_after_a_prediction(kind):
    """Graphs of static_shape share resources of the thread that queues them."""
    results = []
    for contexts in cpus(2), cpus(1):
        nets = [started(Normalized(), None, seed=seed) for seed in (1, 2)]
        for net in nets:
            move(net, contexts)
            if len(contexts) > 1:
                set_mode(convert_sync_batchnorm(net), "static_shape")
        first, second = nets
        shards, found = gluon.utils.split_and_load(array(X), contexts), []
        for x in shards:
            second(first(x)).wait_to_read()
        for _ in range(3):
            losses = []
            with autograd.record():
                for x in shards:
                    with autograd.predict_mode():
                        target = first(x).detach() if kind == "own target" else 0
                    y = first(x) if kind == "own target" else second(first(x))
                    losses.append(((y - target) ** 2).sum())
            autograd.backward(losses)
            found.append(sum(loss.asnumpy() for loss in losses))
        used = nets if kind == "chain" else nets[:1]
        found += [summed_grad(p) for net in used for p in parameters_of(net)]
        results.append(found)
    assert_same(*results)


# ---- Trainers.


class OfHorovod(Trainer):
    """Doubles the first device's gradients, like Horovod's sum over two processes."""

    def _allreduce_grads(self):
        for parameter in self._params:
            if parameter.grad_req != "null":
                parameter.list_grad()[0][:] *= 2


TRAINERS = {
    "without kvstore": (Trainer, {"kvstore": None}),
    "local": (Trainer, {"kvstore": "local", "update_on_kvstore": True}),
    "on devices": (Trainer, {"kvstore": "device", "update_on_kvstore": False}),
    "a kvstore": (Trainer, {"kvstore": mx.kv.create("local")}),
    "of Horovod": (OfHorovod, {"kvstore": None}),
}
# sgld draws random numbers; nadam counts all its updates.
OPTIMIZERS = "adam", "nadam", "sgld", "signum", "ftml"


@pytest.mark.parametrize(
    "kind, optimizer",
    [(name, "sgd") for name in TRAINERS] + [("local", name) for name in OPTIMIZERS],
)
def test_trainer(kind, optimizer):
    results, (make, options) = [], TRAINERS[kind]
    for contexts in cpus(2), None:
        net = started(Net(dense(), dense()), contexts)
        parameters = net.collect_params()
        trainer = make(parameters, optimizer, **(options if contexts else {}))
        for _ in range(3):
            differentiate(lambda net: (net(array(X)) ** 2).sum(), net)
            mx.random.seed(3)  # a call of the net may draw a seed for its devices
            trainer.step(6)
        results.append(state_of(net))
    assert_same(*results)


BOTH, ONE = cpus(2), cpus(1)
CHANGES_OF_NETS = {  # a change, and the contexts of the inputs before and after it
    "becomes parallel": (partial(make_parallel, ctx=BOTH), BOTH, ONE),
    "moves to both": (partial(make_parallel, ctx=BOTH, reset_ctx=True), ONE, ONE),
    "is reverted": (revert_parallel, ONE, BOTH),
}


@pytest.mark.parametrize("kind", CHANGES_OF_NETS)
def test_momentum_stays_when_a_net_becomes_parallel_or_is_reverted(kind):
    """The net trains for two steps before the change and for two steps after it."""

    def program(change, before, after):
        net = started(Net(dense()), BOTH if change is revert_parallel else None)
        if change is not revert_parallel:
            move(net, before)
        settings = {"learning_rate": 0.01, "momentum": 0.9}
        trainer = Trainer(net.collect_params(), "sgd", settings)
        for step, contexts in enumerate((before, before, after, after)):
            if step == 2 and change:
                change(net)
            with autograd.record():
                shards = gluon.utils.split_and_load(array(X), contexts)
                losses = [(net(x) ** 2).sum() for x in shards]
            autograd.backward(losses)
            trainer.step(6)
        check_replicas(net)
        return [value(p) for p in parameters_of(net)]

    assert_same(program(*CHANGES_OF_NETS[kind]), program(None, ONE, ONE))


AMP = """
import gluon_syncbn
import mxnet as mx
from mxnet import autograd, gluon
from mxnet.contrib import amp

amp.init(target_dtype="bfloat16")
net = gluon.nn.Dense(1, use_bias=False, in_units=2)
net.initialize(mx.init.One())
x = mx.nd.array([[1, 2], [3, 5], [2, 0.5]])  # bfloat16 holds all numbers exactly
try:
    net(x).wait_to_read()
except mx.MXNetError as error:
    print("MXNet by itself cannot compute a Dense in bfloat16:", error)
    raise SystemExit from None
net = gluon_syncbn.make_parallel(net, [mx.cpu(0), mx.cpu(1)], reset_ctx=True)
net.hybridize()
x.attach_grad()
with autograd.record():
    y = net(x)
    loss = gluon.loss.L1Loss()(y, mx.nd.zeros((3, 1)))
loss.backward()
assert y.dtype.names == ("bfloat16",), y.dtype
for array in mx.nd.amp_cast(y, dtype="float32"), x.grad, *net.weight.list_grad():
    print(array.asnumpy().tolist())
"""


def test_bfloat16():
    """make_parallel under contrib.amp, which changes the operators of a process."""
    amp = pytest.importorskip("mxnet.contrib.amp", reason="MXNet 2 has no contrib.amp")
    if not hasattr(amp.lists, "symbol_bf16"):
        pytest.skip("bfloat16 needs MXNet 1.7")
    result = run_python(AMP)
    if result.stdout.startswith("MXNet by itself"):
        pytest.skip(result.stdout[:300])
    assert result.stdout.splitlines() == [
        "[[3.0], [8.0], [2.5]]",
        "[[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]",
        *["[[6.0, 7.5]]"] * 2,
    ], result.stderr
