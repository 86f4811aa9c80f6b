"""What a gluon.Trainer holds, and its methods, which are wrapped here.

Called by ``native/steps.py``, ``parallel`` and ``distributed``. A Trainer publishes its
learning rate and optimizer only, and has no hooks.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import wraps
from typing import Any, Callable

import mxnet as mx


def update_counts(optimizer: Any) -> dict:
    """For each device the number of updates by index; `num_update` is one of all."""
    return optimizer._all_index_update_counts


def parameters_of(trainer: mx.gluon.Trainer) -> list:
    """All parameters, in the order of the optimizer's indices."""
    return trainer._params


def not_copied_yet(trainer: mx.gluon.Trainer) -> list:
    """Initialized parameters that the trainer has not copied to its kvstore yet."""
    return [p for p in trainer._params_to_init if not p._deferred_init]


def contexts_of(trainer: mx.gluon.Trainer) -> list[mx.Context]:
    """Contexts of the parameters when the trainer was made."""
    return trainer._contexts


def updates_on_kvstore(trainer: mx.gluon.Trainer) -> bool:
    """Tells whether a kvstore updates the parameters, rather than each device."""
    return bool(trainer._update_on_kvstore)


def states_of(trainer: mx.gluon.Trainer) -> list[dict]:
    """For each device the optimizer's states; `save_states` only writes files."""
    return [updater.states for updater in trainer._updaters]


def adds_up_gradients(trainer: mx.gluon.Trainer) -> bool:
    """Tells whether a step adds gradients up over devices.

    Subclasses, as those for several processes, add up in their own way.
    """
    is_plain = type(trainer)._allreduce_grads is mx.gluon.Trainer._allreduce_grads
    return not is_plain or trainer._kvstore_params["kvstore"] is not None


def wrap(around_step: Callable, around_init: Callable, around_update: Callable) -> None:
    """Runs every Trainer's methods inside of context managers.

    Each function takes the trainer and returns the context manager: of a whole step, of
    the first copies of parameters, of the update of all parameters.
    """
    kind = mx.gluon.Trainer
    initialize, reduce, update = kind._init_params, kind._allreduce_grads, kind._update
    original_step = kind.step

    @wraps(original_step)
    def step(self, *args, **kwargs):
        with around_step(self):
            original_step(self, *args, **kwargs)

    @wraps(initialize)
    def _init_params(self):
        with around_init(self):
            initialize(self)

    # A kvstore that updates does it in the reduction, also in MXNet 1.6, where `update`
    # copies the results.
    @wraps(reduce)
    def _allreduce_grads(self):
        with around_update(self) if self._update_on_kvstore else nullcontext():
            reduce(self)

    @wraps(update)
    def _update(self, *args, **kwargs):
        with nullcontext() if self._update_on_kvstore else around_update(self):
            update(self, *args, **kwargs)

    for method in (step, _init_params, _allreduce_grads, _update):
        setattr(kind, method.__name__, method)
