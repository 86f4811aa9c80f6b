"""Reads an .npz file of any origin: all sizes are checked before use.

Called by checkpoint.py. It takes what `numpy.savez` writes (stored members in version 1
of the .npy format), allocates no more than the file's size, and never unpickles. It
must not know what the arrays mean.
"""

import math
import os
import re
import struct
import zipfile

import numpy as np

_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    rb"\{'descr': '([<>|][a-zA-Z]\d{0,9})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,18}, ?)*\d{0,18})\), \} *\n"
)


class Damaged(ValueError):
    """Tells why a file is no such archive, as the end of a sentence."""


def read(file):
    """The arrays of an open file by name; they are views of what was read.

    Raises
    ------
    Damaged
        If any part of the file is not what its size or its checksum says.
    """
    size = os.fstat(file.fileno()).st_size
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            names = {member.filename for member in members}
            if len(names) < len(members):
                raise Damaged("it holds two arrays of one name")
            if sum(max(m.file_size, m.compress_size) for m in members) > size:
                raise Damaged(f"its arrays claim more than its {size} bytes")
            return dict(_array(archive, member) for member in members)
    except Damaged:
        raise
    except (
        zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError,
        RuntimeError, OverflowError, struct.error,
    ):  # fmt: skip
        raise Damaged("it is cut off or altered") from None


def _array(archive, member):
    name, dot, ending = member.filename.rpartition(".")
    if not name or ending != "npy" or member.compress_type != zipfile.ZIP_STORED:
        raise Damaged("it holds members that are not stored .npy arrays")
    data = archive.read(member)
    length = int.from_bytes(data[8:10], "little")
    header = _HEADER.fullmatch(data, 10, 10 + length)
    if not data.startswith(_MAGIC) or not header:
        raise Damaged(f"the header of its array {name[:60]!r} is not understood")
    try:
        dtype = np.dtype(header[1].decode())
    except TypeError:
        raise Damaged(f"its array {name[:60]!r} is of an unknown type") from None
    if dtype.hasobject:
        raise Damaged(f"its array {name[:60]!r} is pickled, which could run code")
    shape = tuple(int(side) for side in re.findall(rb"\d+", header[3]))
    if len(shape) > 8:
        raise Damaged(f"its array {name[:60]!r} has {len(shape)} dimensions")
    payload = len(data) - header.end()
    if not payload or payload != math.prod(shape) * dtype.itemsize:
        raise Damaged(
            f"its array {name[:60]!r} has {payload} bytes, not those of a {dtype} "
            f"array of shape {shape}"
        )
    values = np.frombuffer(data, dtype, offset=header.end())
    return name, values.reshape(shape, order="F" if header[2] == b"True" else "C")
