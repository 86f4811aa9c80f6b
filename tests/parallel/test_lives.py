"""Lives of nets: a program on several devices does what it does on one device.

After each step of a random life all arrays are compared with plain MXNet on one device,
which then gets the compared values. GLUON_SYNCBN_LIVES=1000 runs other lives each time.
"""

import itertools
import os

import gluon_syncbn
from gluon_syncbn.native import failures

import mxnet as mx
import pytest
from hypothesis import settings
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
from support.lives import GRADIENTS, LOSSES, STEPS, WRITES, Life
from support.nets import CALLS, assert_same
from support.programs import SETTINGS

COUNT = int(os.environ.get("GLUON_SYNCBN_LIVES", "100"))
one_of, rows, flag = st.sampled_from, st.integers(1, 7), st.booleans()
grad_reqs, kvstores = (
    one_of(["write", "add", "null"]),
    one_of(["device", "local", None]),
)
optimizers = one_of(["sgd", "nag"])
# Contexts in their order. MXNet's current context, cpu(0), is not always the first one.
PLACES = cpus(2), cpus(1), cpus(3), cpus(2, first=1), cpus(2)[::-1]


def is_parallel(lives):
    return lives.many.is_parallel


TRAINING = {
    "calls": st.lists(one_of(list(CALLS)), min_size=1, max_size=3),
    "loss": one_of(LOSSES),
    "rows": rows,
    "inputs": one_of([None, "write", "add"]),
    "gradients": one_of(GRADIENTS),
    "step": one_of(STEPS),
    "has_two_scopes": flag,
    "trains": one_of([True, True, False]),
    "looks": flag,
}


def may_grow(lives):
    return lives.many.is_parallel and len(lives.one.net.layers) < 7


def follows_calls(lives):
    """Return False if MXNet's own layers update their statistics in backward."""
    return not lives.many.updates_in_backward()


def same(method, when=None, **strategies):
    """Make a rule that calls a method of both lives, if `when` holds."""

    def act(self, **arguments):
        self.both(method, **arguments)

    act.__name__ = method
    act = rule(**strategies)(act)
    return precondition(when)(act) if when else act


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
            getattr(life, method)(*arguments, **options) or []
            for life in (self.many, self.one)
        )
        assert_same(*([a.asnumpy() for a in arrays] for arrays in (found, right)))
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

    @rule(**TRAINING)
    def train(self, calls, loss, has_two_scopes, **arguments):
        if not follows_calls(self):
            calls, has_two_scopes = ["once"], False
            loss = "sum" if loss == "one by one" else loss
        for call in calls:
            kind = {"call": call, "loss": "penalty" if call == "nothing" else loss}
            self.both("train", has_two_scopes=has_two_scopes, **kind, **arguments)

    @rule(**TRAINING)  # a life trains more often than it does other things
    def train_again(self, **arguments):
        self.train(**arguments)

    predict = same("predict", rows=rows, count=st.integers(1, 3))
    map = same("map", lambda lives: lives.many.may_map(), trains=flag)
    adapt = same("adapt", follows_calls, rows=rows)
    read, fail = same("read"), same("fail")

    @rule()
    def check_replicas(self):
        gluon_syncbn.check_replicas(self.many.net)

    # ---- Parameters.

    keep, write = same("keep"), same("write", road=one_of(WRITES), looks=flag)
    initialize_again, reset_ctx = same("initialize"), same("reset_ctx")
    set_grad_req = same("set_grad_req", number=st.integers(0, 20), grad_req=grad_reqs)
    accumulate = same("accumulate", grad_req=one_of(["add", "write"]))

    # ---- Trainers.

    renew_trainer = same("renew_trainer", optimizer=optimizers, kvstore=kvstores)
    set_learning_rate = same("set_learning_rate", rate=one_of([2**-7, 2**-6, 0.0]))
    save_states = same("save_states")
    load_states = same("load_states", lambda lives: lives.one.states)

    # ---- Nets.

    hybridize = same("hybridize", is_parallel, mode=one_of(list(MODES)))
    move = same("move", contexts=one_of(PLACES), keeps_states=flag)
    move_to_one = same("move_to_one", reverts_norms=flag, keeps_states=flag)
    make_parallel_again = same("make_parallel_again", is_parallel)
    revert_norms, convert = same("revert_norms", is_parallel), same("convert")
    freeze = same("freeze", frozen=flag)
    sizes = st.lists(rows, min_size=1, max_size=3)
    recompute = same("recompute", lambda lives: not lives.one.is_frozen, sizes=sizes)
    # MXNet cannot copy a hybridized net that was called.
    copy = same("copy", lambda lives: lives.many.mode == "imperative", goes_on=flag)

    add_layer = same("add_layer", may_grow, is_norm=flag, trains=flag)


@gluon_1_only("nets of Gluon 2 hold weak references, which are not copied")
@pytest.mark.timeout(4 * COUNT)
def test_lives():
    options = settings(
        SETTINGS,
        max_examples=COUNT,
        stateful_step_count=20,
        derandomize=COUNT == 100,
    )
    run_state_machine_as_test(Lives, settings=options)


@gluon_1_only("arrays of mx.nd")
@pytest.mark.parametrize("call", CALLS)
def test_each_call_with_each_loss(call):
    """Random lives may draw a combination of these rarely."""
    losses = ["penalty"] if call == "nothing" else LOSSES
    for contexts in PLACES[0], PLACES[2]:
        lives = Lives()
        lives.one, lives.many = Life(None), Life(contexts)
        for inputs, loss in itertools.product([None, "write", "add"], losses):
            kind = call, loss, 6, inputs, "grad", "trainer", False
            lives.both("train", *kind, trains=True, looks=False)
