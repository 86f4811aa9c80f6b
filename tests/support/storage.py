"""Arrays of every dtype that kernels know, as NumPy can hold them.

Called by tests that hand raw memory to native code. NumPy only: no MXNet, no package.
"""

import numpy as np

# Numbers of the library's DType.
DTYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 12}
GUARD = 64  # bytes on both sides of an array


def storage_of(dtype):
    """The dtype in which NumPy stores `dtype`: of bfloat16, its bits."""
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def to_storage(values, dtype):
    """`values` in `dtype`; bfloat16 as its bits, cut off rather than rounded."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(values, dtype)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return (bits >> 16).astype(np.uint16)


def to_float64(stored, dtype):
    if dtype != "bfloat16":
        return stored.astype(np.float64)
    return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


class HostArray:
    """An array between guard bytes, filled with NaN bits unless values are given."""

    def __init__(self, shape, storage, values=None):
        self._shape, self._storage = shape, np.dtype(storage)
        self._end = GUARD + int(np.prod(shape)) * self._storage.itemsize
        self._bytes = np.full(self._end + GUARD, 0xFF, np.uint8)
        if values is not None:
            array = np.ascontiguousarray(values, storage)
            self._bytes[GUARD : self._end] = array.reshape(-1).view(np.uint8)

    @property
    def pointer(self):
        return self._bytes.ctypes.data + GUARD

    def get(self):
        """The values; asserts that nothing was written around them."""
        assert (self._bytes[:GUARD] == 0xFF).all(), "written before the array"
        assert (self._bytes[self._end :] == 0xFF).all(), "written after the array"
        inside = self._bytes[GUARD : self._end]
        return inside.view(self._storage).reshape(self._shape)
