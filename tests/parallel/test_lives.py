"""Lives of nets: a program on several devices does what it does on one device.

A life is a random order of what programs do with a net. After each step outputs,
parameters, statistics and gradients are compared with plain MXNet on one device, run
imperatively in float64. Then the program of one device gets the compared values, so
each step is compared by itself. hypothesis reduces a life that differs, and prints its
steps. The 100 lives are always the same. GLUON_SYNCBN_LIVES=1000 runs as many random
lives.
"""

import os

import gluon_syncbn
from gluon_syncbn.native import failures

import mxnet as mx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.blocks import gluon_1_only
from support.helpers import MODES, cpus
from support.lives import CALLS, GRADIENTS, LOSSES, STEPS, WRITES, Life
from support.nets import assert_same

COUNT = int(os.environ.get("GLUON_SYNCBN_LIVES", "100"))
one_of, rows, flag = st.sampled_from, st.integers(1, 7), st.booleans()
# Contexts in their order. MXNet's current context, cpu(0), is not always the first one.
PLACES = cpus(2), cpus(1), cpus(3), cpus(2, first=1), cpus(2)[::-1]


def to_numpy(array):
    return array.asnumpy() if isinstance(array, mx.nd.NDArray) else array


def while_parallel(method):
    return precondition(lambda lives: lives.many.is_parallel)(method)


class Lives(RuleBasedStateMachine):
    """The same life on one device and on several."""

    @initialize(contexts=one_of(PLACES), mode=one_of(list(MODES)))
    def begin(self, contexts, mode):
        self.one, self.many = Life(None), Life(contexts)
        self.both("hybridize", mode)

    def teardown(self):
        try:
            mx.nd.waitall()
        finally:
            if failures.failure():
                gluon_syncbn.recover()

    def both(self, method, *arguments, **options):
        """Call a method of both lives; compare its results, and all arrays."""
        found, right = (
            getattr(life, method)(*arguments, **options)
            for life in (self.many, self.one)
        )
        assert_same(*(list(map(to_numpy, arrays)) for arrays in (found, right)))
        mx.nd.waitall()
        for p, expected in zip(self.many.parameters(), self.one.parameters()):
            # Public methods would tell the net that the program may change the array.
            pairs = [(p._data[0], expected._data[0])]
            if expected._grad:
                pairs.append((p._grad[0], expected._grad[0]))
            for array, right in pairs:
                assert_same([array.asnumpy()], [right.asnumpy()])
                right[:] = array.asnumpy()

    # ---- Calls.

    @rule(
        call=one_of(list(CALLS)),
        loss=one_of(LOSSES),
        rows=rows,
        inputs=one_of([None, "write", "add"]),
        gradients=one_of(GRADIENTS),
        step=one_of(STEPS),
        has_two_scopes=flag,
        trains=one_of([True, True, False]),
        looks=flag,
    )
    def train(self, call, loss, rows, inputs, gradients, step, **flags):
        if self.many.updates_in_backward():
            call, flags["has_two_scopes"] = "once", False
        loss = "penalty" if call == "nothing" else loss
        self.both("train", call, loss, rows, inputs, gradients, step, *flags.values())

    @rule(rows=rows, count=st.integers(1, 3))
    def predict(self, rows, count):
        self.both("predict", rows, count)

    @precondition(lambda lives: lives.many.may_map())
    @rule(trains=flag)
    def map(self, trains):
        self.both("map", trains)

    @precondition(lambda lives: not lives.many.updates_in_backward())
    @rule(rows=rows)
    def adapt(self, rows):
        self.both("adapt", rows)

    @rule()
    def read(self):
        self.both("read")

    @rule()
    def check_replicas(self):
        gluon_syncbn.check_replicas(self.many.net)

    @rule()
    def fail(self):
        self.both("fail")

    # ---- Parameters.

    @rule()
    def keep(self):
        self.both("keep")

    @rule(road=one_of(WRITES))
    def write(self, road):
        self.both("write", road)

    @rule()
    def initialize_again(self):
        self.both("initialize")

    @rule()
    def reset_ctx(self):
        self.both("reset_ctx")

    @rule(number=st.integers(0, 20), grad_req=one_of(["write", "add", "null"]))
    def set_grad_req(self, number, grad_req):
        self.both("set_grad_req", number, grad_req)

    @rule(grad_req=one_of(["add", "write"]))
    def accumulate(self, grad_req):
        self.both("accumulate", grad_req)

    # ---- Trainers.

    @rule(optimizer=one_of(["sgd", "nag"]), kvstore=one_of(["device", "local", None]))
    def renew_trainer(self, optimizer, kvstore):
        self.both("renew_trainer", optimizer, kvstore=kvstore)

    @rule(rate=one_of([2**-7, 2**-6, 0.0]))
    def set_learning_rate(self, rate):
        self.both("set_learning_rate", rate)

    @rule()
    def save_states(self):
        self.both("save_states")

    @precondition(lambda lives: lives.one.states)
    @rule()
    def load_states(self):
        self.both("load_states")

    # ---- Nets.

    @while_parallel
    @rule(mode=one_of(list(MODES)))
    def hybridize(self, mode):
        self.both("hybridize", mode)

    @rule(contexts=one_of(PLACES), keeps_states=flag)
    def move(self, contexts, keeps_states):
        self.both("move", contexts, True, False, keeps_states)

    @rule(reverts_norms=flag, keeps_states=flag)
    def move_to_one_device(self, reverts_norms, keeps_states):
        self.both("move", cpus(1), False, reverts_norms, keeps_states)

    @while_parallel
    @rule()
    def make_parallel_again(self):
        self.both("make_parallel_again")

    @while_parallel
    @rule()
    def revert_norms(self):
        self.both("revert_norms")

    @rule()
    def convert(self):
        self.both("convert")

    @rule(frozen=flag)
    def freeze(self, frozen):
        self.both("freeze", frozen)
        self.is_frozen = frozen

    is_frozen = False

    @precondition(lambda lives: not lives.is_frozen)
    @rule(sizes=st.lists(rows, min_size=1, max_size=3))
    def recompute(self, sizes):
        self.both("recompute", sizes)

    @while_parallel
    @precondition(lambda lives: len(lives.one.net.layers) < 7)
    @rule(is_norm=flag, trains=flag)
    def add_layer(self, is_norm, trains):
        self.both("add_layer", is_norm, trains)

    # MXNet cannot copy a hybridized net that was called.
    @precondition(lambda lives: lives.many.mode == "imperative")
    @rule(goes_on=flag)
    def copy(self, goes_on):
        self.both("copy", goes_on)


@gluon_1_only("nets of Gluon 2 hold weak references, which are not copied")
@pytest.mark.timeout(4 * COUNT)
def test_lives():
    options = settings(
        max_examples=COUNT,
        stateful_step_count=20,
        derandomize=COUNT == 100,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Lives, settings=options)
