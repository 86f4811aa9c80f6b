"""Puts the classes of this wing in the place of GluonCV's and MXNet's own.

Called by users, at the beginning of a training script.
"""

from __future__ import annotations

import mxnet as mx

from ..layer.batch_norm import SyncBatchNorm
from ..mxnet_private.classes import replace_class
from .data_parallel import DataParallelCriterion, DataParallelModel
from .executor import Parallel


def install() -> None:
    """Lets GluonCV's training scripts run on several CPU contexts, as on GPUs.

    Replaces ``DataParallelModel``, ``DataParallelCriterion`` and ``Parallel`` of
    ``gluoncv.utils.parallel`` by :class:`DataParallelModel`,
    :class:`DataParallelCriterion` and :class:`Parallel`, and MXNet's contrib
    ``SyncBatchNorm``, which the scripts take with ``--syncbn`` or ``--norm-layer``, by
    :class:`gluon_syncbn.SyncBatchNorm`. Names that modules have imported already are
    replaced too, so a script may call this at any time before it makes its nets.

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

        gluon_syncbn.gluoncv.install()
        model = gluoncv.utils.parallel.DataParallelModel
        assert model is gluon_syncbn.gluoncv.DataParallelModel
    """
    from gluoncv.utils import parallel

    own = __name__.split(".")[0]
    for new in DataParallelModel, DataParallelCriterion, Parallel:
        replace_class(getattr(parallel, new.__name__), new, own)
    contrib = mx.gluon.contrib.nn.SyncBatchNorm
    # Its own methods find it in that module by its name.
    replace_class(contrib, SyncBatchNorm, own, but=contrib.__module__)
