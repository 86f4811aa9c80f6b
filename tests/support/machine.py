"""Asks MXNet what it can do on this machine, before a test needs it of the package."""

import pytest

from support.helpers import NAMES_OF_NUMPY, run_python

BFLOAT16 = """
import mxnet as mx
from mxnet import autograd
from mxnet.contrib import amp
from mxnet.gluon import nn

amp.init(target_dtype="bfloat16")
net = nn.Dense(2, in_units=8)
net.initialize()
with autograd.record():
    y = net(mx.nd.ones((5, 8)))
y.backward()
mx.nd.waitall()
"""


def skip_unless_mxnet_runs(program):
    """Skips the test with MXNet's own error where `program` ends in one."""
    result = run_python(NAMES_OF_NUMPY + program)
    if result.returncode:
        *_, error = result.stderr.splitlines()
        assert error.startswith("mxnet.base.MXNetError: "), result.stderr
        pytest.skip(f"MXNet by itself cannot do that here: {error}")
