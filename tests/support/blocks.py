"""Blocks for tests, written once for Gluon 1 and Gluon 2."""

from contextlib import nullcontext

from gluon_syncbn.compat import IS_GLUON_2
from gluon_syncbn.mxnet_private import parameters

import mxnet as mx
import pytest
from mxnet.gluon import HybridBlock, contrib, nn

from support.nd import nd

MXNETS_LAYER = nn.SyncBatchNorm if IS_GLUON_2 else contrib.nn.SyncBatchNorm

# Threads other than the main thread begin without NumPy semantics.
in_threads = mx.util.use_np if IS_GLUON_2 else lambda function: function


def by_gluon(first, second):
    """Return `first` in Gluon 1, `second` in Gluon 2."""
    return second if IS_GLUON_2 else first


def gluon_1_only(reason):
    return pytest.mark.skipif(IS_GLUON_2, reason=f"MXNet 2: {reason}")


def prefixed(prefix):
    """Return the argument `prefix` of a block; blocks of Gluon 2 have none."""
    return {} if IS_GLUON_2 else {"prefix": prefix}


def name_scope(block):
    """Return a scope in which children get a block's prefix."""
    return nullcontext() if IS_GLUON_2 else block.name_scope()


class Function(HybridBlock):
    """A block that computes ``compute(F, *inputs, **parameters)``."""

    def __init__(self, prefix=None):
        super().__init__(**prefixed(prefix))

    if IS_GLUON_2:

        def forward(self, *inputs):
            context = inputs[0].context
            own = {n: p.data(context) for n, p in self._reg_params.items()}
            return self.compute(nd, *inputs, **own)

    else:

        def hybrid_forward(self, F, *inputs, **parameters):
            return self.compute(F, *inputs, **parameters)


class Same(Function):
    def compute(self, F, x):
        return F.identity(x)


class Double(Function):
    def compute(self, F, x):
        return 2 * x


def sharing(block, cls, **options):
    """Make a block of class `cls` that shares the parameters of `block`."""
    if IS_GLUON_2:
        return cls(**options).share_parameters(block.collect_params())
    return cls(params=block.params, **options)


def move(net, contexts):
    for parameter in net.collect_params().values():
        parameters.move(parameter, contexts)
