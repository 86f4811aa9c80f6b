"""Several nets at once: in threads of their own, and interleaved in one thread.

GLUON_SYNCBN_REPEAT=250 makes a thousand steps of each run.
"""

import threading
from functools import partial

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import Trainer, loss
from support.deep_nets import REPEAT
from support.helpers import MODES, cpus, set_mode
from support.parallel_nets import SHAPE, small_net

import gluon_syncbn
from gluon_syncbn import make_parallel

STEPS = 4 * REPEAT


def make_net(seed, mode, contexts):
    """A net with weights of its own; plain where there are no contexts."""
    net = small_net()
    if contexts:
        net = make_parallel(net, contexts)
    net.initialize()
    net(mx.nd.ones((len(contexts) + 1, *SHAPE)))  # not partly, which would wait for all
    rng = np.random.default_rng(seed)
    for p in net.collect_params().values():
        p.set_data(mx.nd.array(rng.uniform(0.1, 0.3, p.shape)))
    return set_mode(net, mode)


class Training:
    """Steps of one net, each of which needs the results of the one before."""

    def __init__(self, seed, mode, contexts, attach):
        self.net, self._attach = make_net(seed, mode, contexts), attach
        self._rng = np.random.default_rng(seed)
        options = {"learning_rate": 1e-3}
        self._trainer = Trainer(self.net.collect_params(), "sgd", options)
        self._criterion = loss.SoftmaxCrossEntropyLoss()
        self.arrays = []

    def step(self):
        """Makes half a step at a time: forward, then backward."""
        x = mx.nd.array(self._rng.normal(1, 2, (6, *SHAPE)))
        label = mx.nd.array(self._rng.integers(0, 3, 6))
        if self._attach:
            x.attach_grad()
        with autograd.record():
            total = self._criterion(self.net(x), label)
        yield
        total.backward()
        self._trainer.step(6)
        self.arrays.append(total.asnumpy())
        if self._attach:
            self.arrays.append(x.grad.asnumpy())
        yield

    def run(self, steps):
        for _ in range(steps):
            list(self.step())

    def results(self):
        mx.nd.waitall()
        parameters = self.net.collect_params().values()
        return self.arrays + [a.asnumpy() for p in parameters for a in p.list_data()]


def call_in_threads(*functions):
    """Calls each function in a thread of its own; none may raise an error."""
    errors = []

    def call(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(each,)) for each in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def in_threads(steps, *trainings):
    call_in_threads(*(partial(training.run, steps) for training in trainings))


def interleaved(steps, *trainings):
    for _ in range(steps):
        for _ in zip(*(training.step() for training in trainings)):
            pass


def assert_independent(way, steps, *made):
    """The same bits as one after the other; `made` are the arguments of Training."""
    expected = [Training(number, *each) for number, each in enumerate(made)]
    for training in expected:
        training.run(steps)
    trainings = [Training(number, *each) for number, each in enumerate(made)]
    way(steps, *trainings)
    for training, right in zip(trainings, expected):
        results, values = training.results(), right.results()
        assert len(results) == len(values) > steps
        for number, (result, value) in enumerate(zip(results, values)):
            np.testing.assert_array_equal(result, value, err_msg=f"array {number}")
        if isinstance(training.net, gluon_syncbn.ParallelNet):
            gluon_syncbn.check_replicas(training.net)


@pytest.mark.timeout(120 + 6 * REPEAT)
@pytest.mark.parametrize("way", [in_threads, interleaved])
@pytest.mark.parametrize("mode", MODES)
def test_parallel_nets_and_a_plain_one(mode, way):
    first, second = (mode, cpus(2), True), (mode, cpus(3), False)
    assert_independent(way, STEPS, first, second, (mode, [], True))


def test_nets_are_made_and_dropped_in_threads():
    """Tracing, the first calls, and the end of nets at the same time."""

    def make_and_drop(seed):
        for number in range(5):
            training = Training(seed + number, "static_shape", cpus(2), False)
            training.run(2)
            results[seed] = training.results()

    results = {}
    make_and_drop(0)
    expected = results.pop(0)
    call_in_threads(*(partial(make_and_drop, seed) for seed in (0, 10, 20)))
    assert len(results[0]) == len(expected)
    for result, value in zip(results[0], expected):
        np.testing.assert_array_equal(result, value)
