"""Whether a net is the same on all its devices.

Called by users and tests, between steps; by ``parallel.py`` for what keeps it so.
"""

import warnings
import weakref

import mxnet as mx
import numpy as np

from ._arguments import check_block
from .batch_norm import contexts_of

_warned_of = weakref.WeakSet()


def warn_of_trainer(parameters):
    """Warns, once, of a trainer that does not add gradients up over devices."""
    trainer = parameters[0]._trainer if parameters else None
    if (
        not isinstance(trainer, mx.gluon.Trainer)
        # Else it adds up in a way of its own, as those of several processes do.
        or type(trainer)._allreduce_grads is not mx.gluon.Trainer._allreduce_grads
        or trainer in _warned_of
        or trainer._kvstore_params["kvstore"] is not None
        or len(contexts_of(parameters[0])) < 2
    ):
        return
    _warned_of.add(trainer)
    warnings.warn(
        "the trainer of this net has kvstore=None, so it does not add gradients up "
        "over devices, and these drift apart; expected 'device' or 'local', unless the "
        "program adds gradients up itself. check_replicas(net) tells",
        stacklevel=4,
    )


def check_replicas(net):
    """Checks that parameters and running statistics are identical on all devices.

    They are, bit by bit, as long as every device applies the same gradients; running
    statistics only with synchronized batch normalization. Waits for the work in flight.

    Parameters
    ----------
    net : mxnet.gluon.Block
        Also one that :func:`make_parallel` returned. Parameters that are not
        initialized yet are skipped.

    Raises
    ------
    ValueError
        If there is a difference. The text names the first parameter that differs, the
        two contexts and the largest difference.

    Examples
    --------
    >>> import mxnet as mx
    >>> from gluon_syncbn import check_replicas
    >>> net = mx.gluon.nn.Dense(1, in_units=1, prefix="dense_")
    >>> net.initialize(mx.init.One(), ctx=[mx.cpu(0), mx.cpu(1)])
    >>> check_replicas(net)
    >>> net.weight.data(mx.cpu(1))[:] = 3
    >>> check_replicas(net)
    Traceback (most recent call last):
    ...
    ValueError: parameter 'dense_weight' differs between cpu(0) and cpu(1), by up to 2.0
    """
    check_block("net", net)
    mx.nd.waitall()
    for name, parameter in net.collect_params().items():
        if parameter._data is None:
            continue
        first, *others = parameter._data  # also what is row_sparse
        expected = first.asnumpy()
        for other in others:
            value = other.asnumpy()
            if value.tobytes() != expected.tobytes():
                difference = np.abs(value.astype("f8") - expected.astype("f8")).max()
                raise ValueError(
                    f"parameter '{name}' differs between {first.context} and "
                    f"{other.context}, by up to {difference}"
                )
