"""What a gluon.Trainer holds, and its methods, which are wrapped here.

A Trainer publishes its learning rate and optimizer only, and has no hooks.
"""

from __future__ import annotations

from functools import wraps
from operator import attrgetter
from typing import Callable, Iterable

import mxnet as mx

from ..common.mxnet_version import IS_GLUON_2
from .parameters import trainer_set

# By device and index the number of updates; the public `num_update` is one of all.
update_counts = attrgetter("_all_index_update_counts")  # of an optimizer
parameters_of = attrgetter("_params")  # all, in the order of the optimizer's indices
# Of the parameters when the trainer was made.
contexts_of = attrgetter("_devices" if IS_GLUON_2 else "_contexts")
updates_on_kvstore = attrgetter("_update_on_kvstore")  # rather than on each device


def not_copied_yet(trainer: mx.gluon.Trainer) -> list:
    """Initialized parameters that the trainer has not copied to its kvstore yet."""
    return [p for p in trainer._params_to_init if not p._deferred_init]


def adds_up_gradients(trainer: mx.gluon.Trainer) -> bool:
    """Tells whether a step adds gradients up over devices.

    Subclasses, as those for several processes, add up in their own way.
    """
    return not _is_plain(trainer) or trainer._kvstore_params["kvstore"] is not None


def adds_up_in_this_process_only(trainer: mx.gluon.Trainer) -> bool:
    """Return True if the trainer is none for several processes."""
    store = trainer._kvstore_params["kvstore"]
    name = getattr(store, "type", store) or "local"
    return _is_plain(trainer) and name.startswith(("local", "device", "nccl"))


def _is_plain(trainer):
    return type(trainer)._allreduce_grads is mx.gluon.Trainer._allreduce_grads


def workers_of(trainer: mx.gluon.Trainer) -> int:
    """The processes whose gradients the kvstore adds up; known once a step began."""
    return trainer._kvstore.num_workers if trainer._distributed else 1


def when_trainer_is_set(parameter: mx.gluon.Parameter, act: Callable) -> None:
    """Calls `act` with each trainer that gets the parameter; with its present one, too.

    A Trainer tells its parameters when it is made, and nobody else.
    """
    parameter._set_trainer = _SetTrainer(parameter, act)
    trainer = trainer_set(parameter)
    if trainer is not None:
        act(trainer)


def forget_trainers(parameter: mx.gluon.Parameter) -> None:
    """Undoes :func:`when_trainer_is_set`."""
    vars(parameter).pop("_set_trainer", None)


class _SetTrainer:
    """Takes the place of a parameter's method, also in copies of the parameter."""

    def __init__(self, parameter, act):
        self.parameter, self.act = parameter, act

    def __call__(self, trainer):
        type(self.parameter)._set_trainer(self.parameter, trainer)
        if trainer is not None:
            self.act(trainer)


def wrap(trainer: mx.gluon.Trainer, **arounds: Callable) -> None:
    """Runs methods of one trainer inside of context managers, until `unwrap`.

    Each function takes the trainer, and returns the context manager of the method of
    that name. The methods: ``step``, ``_init_params`` copies parameters to all contexts
    once; ``_allreduce_grads`` updates, too, if the kvstore does; else ``_update`` does.
    """
    for name, around in arounds.items():
        setattr(trainer, name, _wrapped(trainer, getattr(trainer, name), around))


def unwrap(trainer: mx.gluon.Trainer, names: Iterable[str]) -> None:
    """Gives a trainer its own methods back."""
    for name in names:
        vars(trainer).pop(name, None)


def _wrapped(trainer, method, around):
    @wraps(method)
    def wrapped(*args, **kwargs):
        with around(trainer):
            return method(*args, **kwargs)

    return wrapped
