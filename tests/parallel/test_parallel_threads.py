"""Several nets at once: in threads of their own, and interleaved in one thread.

GLUON_SYNCBN_REPEAT=250 makes a thousand steps of each run.
"""

import threading
from functools import partial

import mxnet as mx
import numpy as np
import pytest
from support.helpers import MODES, cpus, repetitions, set_mode, values
from support.parallel_nets import SHAPE, parameters, small_net, training

import gluon_syncbn
from gluon_syncbn import make_parallel

REPEAT = repetitions()
STEPS = 4 * REPEAT


def make_net(seed, mode, contexts):
    """A net with weights of its own; plain where there are no contexts."""
    net = small_net()
    if contexts:
        net = make_parallel(net, contexts)
    net.initialize()
    net(mx.nd.ones((len(contexts) + 1, *SHAPE)))
    rng = np.random.default_rng(seed)
    for p in parameters(net):
        p.set_data(mx.nd.array(rng.uniform(0.1, 0.3, p.shape)))
    return set_mode(net, mode)


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


def one_after_the_other(trainings):
    for each in trainings:
        list(each)


def in_threads(trainings):
    call_in_threads(*(partial(list, each) for each in trainings))


def interleaved(trainings):
    list(zip(*trainings))


def results_of(way, steps, *made):
    """Per net all its results and parameters; `made` has mode, contexts and attach."""
    nets, results, trainings = [], [], []
    for seed, (mode, contexts, attach) in enumerate(made):
        nets.append(make_net(seed, mode, contexts))
        results.append([])
        rows = [6] * steps
        trainings.append(training(nets[-1], rows, results[-1], seed, attach))
    way(trainings)
    mx.nd.waitall()
    for net, arrays in zip(nets, results):
        gluon_syncbn.check_replicas(net)
        arrays += values(net)
    return results


def assert_same_bits(results, expected):
    for arrays, rights in zip(results, expected):
        assert len(arrays) == len(rights)
        for number, (array, right) in enumerate(zip(arrays, rights)):
            np.testing.assert_array_equal(array, right, err_msg=f"array {number}")


@pytest.mark.timeout(120 + 6 * REPEAT)
@pytest.mark.parametrize("way", [in_threads, interleaved])
@pytest.mark.parametrize("mode", MODES)
def test_parallel_nets_and_a_plain_one(mode, way):
    made = (mode, cpus(2), True), (mode, cpus(3), False), (mode, [], True)
    expected = results_of(one_after_the_other, STEPS, *made)
    assert_same_bits(results_of(way, STEPS, *made), expected)


def test_nets_are_made_and_dropped_in_threads():
    """Tracing, the first calls, and the end of nets at the same time."""
    results = []

    def make_and_drop():
        made = "static_shape", cpus(2), False
        for _ in range(5):
            results.extend(results_of(one_after_the_other, 2, made))

    make_and_drop()
    expected = results[:1]
    call_in_threads(*[make_and_drop] * 3)
    assert len(results) == 20
    assert_same_bits(results, expected * 20)
