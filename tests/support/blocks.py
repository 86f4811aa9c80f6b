"""Blocks for tests, written once for Gluon 1 and Gluon 2."""

from contextlib import nullcontext

from gluon_syncbn.common.mxnet_version import IS_GLUON_2

import pytest
from mxnet.gluon import HybridBlock

from support.nd import nd


def gluon_1_only(reason):
    """A mark for tests of what MXNet 2 has not."""
    return pytest.mark.skipif(IS_GLUON_2, reason=f"MXNet 2: {reason}")


def prefixed(prefix):
    """The argument of a block for its names, of which Gluon 2 has none."""
    return {} if IS_GLUON_2 else {"prefix": prefix}


def name_scope(block):
    """Where children get a block's prefix."""
    return nullcontext() if IS_GLUON_2 else block.name_scope()


class Function(HybridBlock):
    """A block that computes ``compute(F, *inputs, **parameters)``."""

    def __init__(self, prefix=None):
        super().__init__(**prefixed(prefix))

    if IS_GLUON_2:

        def forward(self, *inputs):
            context = inputs[0].context
            parameters = {n: p.data(context) for n, p in self._reg_params.items()}
            return self.compute(nd, *inputs, **parameters)

    else:

        def hybrid_forward(self, F, *inputs, **parameters):
            return self.compute(F, *inputs, **parameters)
