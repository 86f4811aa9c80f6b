"""The structs of src/kernels/passes.h, for ctypes.

Called by cuda_driver.py, which points them at device memory.
"""

import ctypes

WRITE, ADD = 1, 2  # of Request


class Layout(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("outer", "channels", "inner")]


class Activation(ctypes.Structure):
    _fields_ = [("function", ctypes.c_int), ("slope", ctypes.c_double)]


def pointers(*names):
    return [(name, ctypes.c_void_p) for name in names]


DATA = [("dtype", ctypes.c_int), ("layout", Layout)]
REQUEST = ("request", ctypes.c_int)


class MomentsPass(ctypes.Structure):
    _fields_ = [*DATA, *pointers("x", "mean", "m2")]


class NormalizePass(ctypes.Structure):
    _fields_ = [
        *(*DATA, *pointers("x", "mean", "scale", "offset")),
        *(("activation", Activation), REQUEST, *pointers("y")),
    ]


INPUT = [
    *(*DATA, *pointers("t", "dy"), ("activation", Activation)),
    *(("from_output", ctypes.c_bool), *pointers("mean", "scale", "offset")),
]


class SumsPass(ctypes.Structure):
    _fields_ = [*INPUT, *pointers("sum_dz", "sum_dz_u")]


class ApplyPass(ctypes.Structure):
    _fields_ = [*INPUT, *pointers("a", "b", "d"), REQUEST, *pointers("dx")]


# By kernel, each with the names of its results.
PASSES = {
    "local_moments": (MomentsPass, ("mean", "m2")),
    "normalize": (NormalizePass, ("y",)),
    "backward_sums": (SumsPass, ("sum_dz", "sum_dz_u")),
    "backward_apply": (ApplyPass, ("dx",)),
}
