"""What a gluon.Trainer holds, and its methods, which are wrapped here.

Called by ``native/steps.py``, ``parallel`` and ``distributed``. A Trainer publishes its
learning rate and optimizer only, and has no hooks.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from operator import attrgetter
from typing import Callable

import mxnet as mx

# By device and index the number of updates; the public `num_update` is one of all.
update_counts = attrgetter("_all_index_update_counts")  # of an optimizer
parameters_of = attrgetter("_params")  # all, in the order of the optimizer's indices
contexts_of = attrgetter("_contexts")  # of the parameters when the trainer was made
updates_on_kvstore = attrgetter("_update_on_kvstore")  # rather than on each device

_until_end = threading.local()  # `of_step`: what ends with the step under way


def not_copied_yet(trainer: mx.gluon.Trainer) -> list:
    """Initialized parameters that the trainer has not copied to its kvstore yet."""
    return [p for p in trainer._params_to_init if not p._deferred_init]


def states_of(trainer: mx.gluon.Trainer) -> list[dict]:
    """The optimizer's states, of each device or of a kvstore that updates.

    `save_states` only writes files.
    """
    if not trainer._update_on_kvstore:
        return [updater.states for updater in trainer._updaters]
    updater = trainer._kvstore._updater  # None if servers update
    return [updater.states] if updater else []


def adds_up_gradients(trainer: mx.gluon.Trainer) -> bool:
    """Tells whether a step adds gradients up over devices.

    Subclasses, as those for several processes, add up in their own way.
    """
    is_plain = type(trainer)._allreduce_grads is mx.gluon.Trainer._allreduce_grads
    return not is_plain or trainer._kvstore_params["kvstore"] is not None


def workers_of(trainer: mx.gluon.Trainer) -> int:
    """The processes whose gradients the kvstore adds up; known once a step began."""
    return trainer._kvstore.num_workers if trainer._distributed else 1


def wrap(
    around_step: Callable,
    around_init: Callable,
    around_update: Callable,
    before_updater: Callable,
) -> None:
    """Runs every Trainer's methods inside of context managers.

    Each function takes the trainer and returns the context manager: of a whole step, of
    the first copies of parameters, of the update of all parameters. `before_updater`
    is called before each call of an Updater, which a kvstore makes too, for its weight.
    """

    @contextmanager
    def whole_step(trainer):
        with around_step(trainer), ExitStack() as _until_end.of_step:
            yield

    # A kvstore that updates does it in the reduction, and MXNet 1.6 copies the results
    # in `_update`. MXNet allows only `step` for it.
    @contextmanager
    def reduction(trainer):
        if updates_on_kvstore(trainer):
            _until_end.of_step.enter_context(around_update(trainer))
        yield

    def own_update(trainer):
        return nullcontext() if updates_on_kvstore(trainer) else around_update(trainer)

    _wrap_method("step", whole_step)
    _wrap_method("_init_params", around_init)
    _wrap_method("_allreduce_grads", reduction)
    _wrap_method("_update", own_update)
    _wrap_updater(before_updater)


def _wrap_method(name, around):
    method = getattr(mx.gluon.Trainer, name)

    @wraps(method)
    def wrapped(self, *args, **kwargs):
        with around(self):
            method(self, *args, **kwargs)

    setattr(mx.gluon.Trainer, name, wrapped)


def _wrap_updater(before):
    call = mx.optimizer.Updater.__call__

    @wraps(call)
    def wrapped(self, index, grad, weight):
        before(self, index, grad, weight)
        call(self, index, grad, weight)

    mx.optimizer.Updater.__call__ = wrapped
