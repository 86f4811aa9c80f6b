"""Support for GluonCV's training scripts on several CPU contexts."""

import sys
from functools import lru_cache, wraps

import mxnet as mx
from mxnet import autograd

from .conversion import convert_sync_batchnorm
from .layer.batch_norm import SyncBatchNorm
from .layer.finding import synchronized_layers
from .nested import arrays_in
from .parallel.devices import OwnThreads, inside_map
from .parallel.plain_loop import allow_plain_loop

__all__ = ["install", "uninstall"]

_replaced: list = []  # owner, name and value of each replaced attribute
_devices_of = lru_cache(maxsize=None)(OwnThreads)


def install() -> None:
    """Make GluonCV's training scripts use this package, also on several CPU contexts.

    Call it before a script makes its net. The following holds until :func:`uninstall`:

    * ``mxnet.gluon.contrib.nn.SyncBatchNorm`` is :class:`gluon_syncbn.SyncBatchNorm`.
      Scripts use it with ``--syncbn`` or ``--norm-layer``. Nets whose names have
      ``syncbn`` use it, also in their feature pyramids.
    * ``ROIAlign`` returns zeros for regions that it skips. MXNet leaves their memory
      uninitialized on CPUs.
    * Nets with these layers train on several contexts as after
      :func:`gluon_syncbn.allow_plain_loop`, also in GluonCV's ``utils.parallel``.

    Examples
    --------
    .. code-block:: python

        import gluon_syncbn
        gluon_syncbn.gluoncv.install()
    """
    from gluoncv.nn.feature import FPNFeatureExpander
    from gluoncv.utils import parallel

    call, apply = mx.gluon.Block.__call__, parallel.parallel_apply
    make_pyramid = FPNFeatureExpander.__init__

    def called(block, *args):
        if autograd.is_training() and not inside_map() and "forward" not in vars(block):
            if any(len(x.contexts()) > 1 for x in synchronized_layers(block)):
                allow_plain_loop(block)
        return call(block, *args)

    def apply_without_threads(module, inputs, kwargs_tup=None, sync=False):
        return apply(module, inputs, kwargs_tup)  # sync=True would start threads

    def put(executor, shard):
        devices = _devices_of(arrays_in(shard)[0].context)
        run = executor._parallizable.forward_backward
        executor._out_queue.put(*devices.map(run, [shard]))

    @wraps(make_pyramid)
    def init(block, *args, norm_layer=None, norm_kwargs=None, **kwargs):
        options = {"norm_layer": norm_layer, "norm_kwargs": norm_kwargs}
        make_pyramid(block, *args, **options, **kwargs)
        if norm_layer is mx.sym.contrib.SyncBatchNorm:  # an operator, not a block
            convert_sync_batchnorm(block, (norm_kwargs or {}).get("ndev", 1))

    def roi_align_change(F):
        align = F.contrib.ROIAlign

        def roi_align(data, rois, *args, **kwargs):
            # MXNet writes the zeros of a skipped region to the first region's output,
            # and leaves the skipped region's output uninitialized.
            is_used = F.slice_axis(rois, axis=1, begin=0, end=1).reshape((-1,)) >= 0
            y = align(data, F.where(is_used, rois, rois * 0), *args, **kwargs)
            return F.where(is_used, y, F.zeros_like(y))

        return F.contrib, "ROIAlign", roi_align

    contrib = mx.gluon.contrib.nn
    users = contrib, *_modules(contrib.SyncBatchNorm)
    changes = [
        *((module, "SyncBatchNorm", SyncBatchNorm) for module in users),
        (FPNFeatureExpander, "__init__", init),
        roi_align_change(mx.nd),
        roi_align_change(mx.sym),
        (mx.gluon.Block, "__call__", called),
        (parallel, "parallel_apply", apply_without_threads),
        (parallel.Parallel, "put", put),
    ]
    for owner, name, value in [] if _replaced else changes:
        _replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)


def uninstall() -> None:
    """Undo `install`; existing nets are not changed.

    Examples
    --------
    >>> import gluon_syncbn
    >>> gluon_syncbn.gluoncv.uninstall()
    """
    while _replaced:
        setattr(*_replaced.pop())
    for module in _modules(SyncBatchNorm):  # modules imported after `install`
        module.SyncBatchNorm = mx.gluon.contrib.nn.SyncBatchNorm


def _modules(kind):
    """Return GluonCV's modules in which SyncBatchNorm is the class `kind`."""
    loaded = [m for name, m in sys.modules.items() if name.startswith("gluoncv.")]
    return [m for m in loaded if vars(m).get("SyncBatchNorm") is kind]
