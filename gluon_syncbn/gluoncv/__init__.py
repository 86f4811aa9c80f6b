"""GluonCV's training scripts on several CPU contexts, as on GPUs.

It must not know what a net computes.
"""

from functools import lru_cache

import mxnet as mx
from mxnet import autograd

from ..common.nested import arrays_in
from ..devices.devices import ContextOfLoop, inside_map
from ..layer.batch_norm import SyncBatchNorm
from ..layer.finding import synchronized_layers
from ..parallel.plain_loop import allow_plain_loop

__all__ = ["install", "uninstall"]

_former: list = []  # owner, name and value of what `install` has replaced
_devices_of = lru_cache(maxsize=None)(ContextOfLoop)


def install() -> None:
    """Lets GluonCV's training scripts run on several CPU contexts, as on GPUs.

    It needs GluonCV. Call it before a script makes its net. Until :func:`uninstall`

    * ``mxnet.gluon.contrib.nn.SyncBatchNorm``, which scripts take with ``--syncbn`` or
      ``--norm-layer``, is :class:`gluon_syncbn.SyncBatchNorm`;
    * :class:`gluon_syncbn.Devices` run nets that are trained on several contexts, as
      :func:`gluon_syncbn.allow_plain_loop` says, and all that ``Parallel`` is given.

    Examples
    --------
    .. code-block:: python

        import gluon_syncbn
        gluon_syncbn.gluoncv.install()
    """
    from gluoncv.utils import parallel

    call, apply = mx.gluon.Block.__call__, parallel.parallel_apply

    def called(block, *args):
        if autograd.is_training() and not inside_map() and "forward" not in vars(block):
            layers = [x for x in synchronized_layers(block) if len(x.contexts()) > 1]
            if layers:
                allow_plain_loop(block)
        return call(block, *args)

    def applied(module, inputs, kwargs_tup=None, sync=False):
        return apply(module, inputs, kwargs_tup)

    def put(executor, shard):
        devices = _devices_of(arrays_in(shard)[0].context)
        run = executor._parallizable.forward_backward
        executor._out_queue.put(*devices.map(run, [shard]))

    changes = [
        (mx.gluon.contrib.nn, "SyncBatchNorm", SyncBatchNorm),
        (mx.gluon.Block, "__call__", called),
        (parallel, "parallel_apply", applied),
        (parallel.Parallel, "put", put),
    ]
    for owner, name, value in [] if _former else changes:
        _former.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)


def uninstall() -> None:
    """Restores what `install` has replaced; nets stay as they are.

    Examples
    --------
    >>> import gluon_syncbn
    >>> gluon_syncbn.gluoncv.uninstall()
    """
    while _former:
        setattr(*_former.pop())
