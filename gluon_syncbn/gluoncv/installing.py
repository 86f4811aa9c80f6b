"""Lets GluonCV's helpers for several devices work on CPUs too, by changing them.

Called by users, at the beginning of a script. It must not know how devices are driven.
"""

from __future__ import annotations

import sys

import mxnet as mx

from ..layer.batch_norm import SyncBatchNorm
from .helpers import Criterion, Executor, Model


def install() -> None:
    """Lets GluonCV's training scripts run on several CPU contexts, as on GPUs.

    Changes ``DataParallelModel``, ``DataParallelCriterion`` and ``Parallel`` of
    ``gluoncv.utils.parallel``, and replaces MXNet's contrib ``SyncBatchNorm``, which
    the scripts take with ``--syncbn`` or ``--norm-layer``, by
    :class:`gluon_syncbn.SyncBatchNorm`, also where modules have imported it already.
    So a script may call this at any time before it makes its nets. Afterwards

    * ``DataParallelModel`` and ``DataParallelCriterion`` take batches with fewer rows
      than contexts. They return one element for each context that has rows; in training
      the layers synchronize over these, and the gradients of the others are set to
      zero, so that a Trainer may add them up.
    * ``Parallel`` runs forward and backward of each shard in a thread of the shard's
      context, when the first result is asked for; ``num_workers`` has no effect. A
      shard without an array is a ValueError, and a `get` without a `put` an IndexError.

    Scripts that loop over contexts themselves (SSD, YOLO3) need
    :func:`gluon_syncbn.allow_plain_loop` for their net.

    Raises
    ------
    ImportError
        If GluonCV is not installed.

    Examples
    --------
    At the beginning of a training script:

    .. code-block:: python

        import gluon_syncbn
        import gluoncv.utils.parallel
        import mxnet as mx

        gluon_syncbn.gluoncv.install()
        net = mx.gluon.nn.Dense(1)
        net.initialize()
        contexts = [mx.cpu(0), mx.cpu(1)]
        model = gluoncv.utils.parallel.DataParallelModel(net, contexts)
        (y,), (z,) = model(mx.nd.ones((4, 2)))
        assert y.shape == z.shape == (2, 1)
    """
    from gluoncv.utils import parallel

    changes = {
        parallel.DataParallelModel: Model,
        parallel.DataParallelCriterion: Criterion,
        parallel.Parallel: Executor,
    }
    for kind, ours in changes.items():
        for name, method in vars(ours).items():
            if callable(method):
                setattr(kind, name, method)
    contrib = mx.gluon.contrib.nn.SyncBatchNorm
    for name, module in list(sys.modules.items()):
        # The class's own methods find it in its module by its name.
        if name.split(".")[0] == __name__.split(".")[0] or name == contrib.__module__:
            continue
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if value is contrib:
                setattr(module, key, SyncBatchNorm)
