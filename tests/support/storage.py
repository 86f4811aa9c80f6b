"""Arrays of every dtype that kernels know, in NumPy's memory between guard bytes.

Called by tests that hand raw memory to native code. NumPy only: no MXNet, no package.
"""

import numpy as np

# Numbers of the library's DType.
DTYPES = {"float32": 0, "float64": 1, "float16": 2}
GUARD = 64  # bytes on both sides of an array


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
