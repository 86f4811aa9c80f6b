"""Makes the MXNet contexts of --ctx and --num-devices, if they exist."""

import mxnet as mx

import gluon_syncbn

from .errors import UserError


def open_contexts(kind, count):
    """`count` contexts of the kind 'cpu' or 'gpu', or a UserError that says why not."""
    if kind == "cpu":
        gluon_syncbn.keep_freed_memory()
        return [mx.cpu(index) for index in range(count)]
    try:
        there = mx.context.num_gpus()
    except mx.MXNetError:
        there = 0
    if not there:
        raise UserError(
            "--ctx gpu needs a GPU and a GPU build of MXNet, and this MXNet sees none: "
            "use --ctx cpu."
        )
    if count > there:
        raise UserError(f"--num-devices is {count}, but MXNet sees {there} GPU(s).")
    return [mx.gpu(index) for index in range(count)]
