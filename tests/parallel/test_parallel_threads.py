"""Several nets at once, in threads of their own.

GLUON_SYNCBN_REPEAT=250 makes a thousand steps of each.
"""

from concurrent.futures import ThreadPoolExecutor

from gluon_syncbn import check_replicas, make_parallel

import mxnet as mx
import numpy as np
import pytest
from support.helpers import cpus, repetitions, set_mode, values
from support.parallel_nets import SHAPE, parameters, small_net, train

REPEAT = repetitions()


def trained(mode, contexts):
    """Losses and parameters of a net; it is plain where there are no contexts."""
    net = small_net()
    if contexts:
        net = make_parallel(net, contexts)
    net.initialize()
    net(mx.nd.ones((len(contexts) + 1, *SHAPE)))
    rng = np.random.default_rng(len(contexts))
    for p in parameters(net):
        p.set_data(mx.nd.array(rng.uniform(0.1, 0.3, p.shape)))
    losses = train(set_mode(net, mode), [6] * 4 * REPEAT)
    check_replicas(net)
    return losses + values(net)


@pytest.mark.timeout(120 + 6 * REPEAT)
@pytest.mark.parametrize("mode", ["imperative", "static_shape"])
def test_parallel_nets_and_a_plain_one(mode):
    arguments = [mode] * 3, [cpus(2), cpus(3), []]
    expected = list(map(trained, *arguments))
    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(trained, *arguments))
    for arrays, rights in zip(results, expected):
        assert len(arrays) == len(rights)
        for number, (array, right) in enumerate(zip(arrays, rights)):
            np.testing.assert_array_equal(array, right, err_msg=f"array {number}")
