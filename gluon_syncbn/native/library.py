"""Find and load the shared library, and register its operator with MXNet."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from pathlib import Path
from typing import Any

import mxnet as mx

from ..arguments import check_choice
from ..compat import __version__
from ..mxnet_private.arrays import mxnet_path

_MPI_NAME = "libgluon_syncbn_mpi.so"
_BUILD = (
    "`pip install .`, or for development with `pip install --no-build-isolation -e .`"
)


class Text(ctypes.c_char_p):
    """A str as an argument or a result of native code."""

    @classmethod
    def from_param(cls, text: Any) -> Text:
        return cls(text.encode())


class Status(ctypes.c_int):
    """The result of a function that can fail and returns nothing else."""


def _check(result, *_call):
    if result.value < 0:
        raise mx.MXNetError(load().gluon_syncbn_last_error())


_CONVERSIONS = {Text: lambda result, *_call: result.value.decode(), Status: _check}


class Activation(ctypes.Structure):
    """The struct Activation of src/kernels/passes.h."""

    _fields_ = [("function", ctypes.c_int), ("slope", ctypes.c_double)]


class LayerOptions(ctypes.Structure):
    """The struct LayerOptions of src/op/options.h."""

    _fields_ = [
        ("activation", Activation),
        ("epsilon", ctypes.c_double),
        ("momentum", ctypes.c_double),
        ("timeout", ctypes.c_double),
        ("num_devices", ctypes.c_int),
        ("axis", ctypes.c_int),
        ("fix_gamma", ctypes.c_int),
        ("unbiased_running_var", ctypes.c_int),
        ("nonfinite", ctypes.c_int),
        ("from_output", ctypes.c_int),
    ]


_pointer, _int = ctypes.c_void_p, ctypes.c_int
_array = ctypes.c_void_p  # the address of a NumPy array's values: `array.ctypes.data`
_int64, _double = ctypes.c_int64, ctypes.c_double

_SIGNATURES = {  # src/c_api/ defines these functions
    "gluon_syncbn_last_error": (Text, []),
    "gluon_syncbn_register": (_int, [Text]),
    "gluon_syncbn_native_missing": (Text, []),
    "gluon_syncbn_blocked_calls": (_int64, []),
    "gluon_syncbn_wait_before_fork": (None, []),
    "gluon_syncbn_create_layer": (_pointer, [Text, Text]),
    "gluon_syncbn_release_layer": (None, [_pointer]),
    "gluon_syncbn_set_options": (
        Status,
        [Text, LayerOptions, Text, _array, _int, Text, _int],
    ),
    "gluon_syncbn_collect": (Status, [Text, _int]),
    "gluon_syncbn_collected": (_int64, [Text, _array, _int64]),
    "gluon_syncbn_set_participants": (Status, [Text, Text]),
    "gluon_syncbn_set_locator": (None, [_pointer]),
    "gluon_syncbn_tell_where": (None, [Text]),
    "gluon_syncbn_wait_seconds": (_double, [Text, Text]),
    "gluon_syncbn_longest_wait": (_double, []),
    "gluon_syncbn_note_time": (None, [_pointer, _pointer]),
    "gluon_syncbn_do_nothing": (None, [_pointer, _pointer]),
    "gluon_syncbn_set_flag": (_int, [_pointer]),
    "gluon_syncbn_set_timeout": (None, [_double]),
    "gluon_syncbn_timeout": (_double, []),
    "gluon_syncbn_failure": (Text, []),
    "gluon_syncbn_status": (Text, []),
    "gluon_syncbn_fail_all": (Status, [Text, _int]),
    "gluon_syncbn_reset_all": (Status, []),
    "gluon_syncbn_commit": (Text, []),
    "gluon_syncbn_instruction_set": (Text, []),
    "gluon_syncbn_num_threads": (_int, []),
    "gluon_syncbn_cuda_architectures": (Text, []),
    "gluon_syncbn_cuda_missing": (Text, []),
    "gluon_syncbn_distributed_open": (Status, [_pointer]),
    "gluon_syncbn_distributed_gather": (
        Status,
        [Text, _array, _int64, _double, _pointer, _pointer],
    ),
    "gluon_syncbn_distributed_leave": (Status, []),
    "gluon_syncbn_distributed_stop": (Status, [_double]),
    "gluon_syncbn_exit_after": (Status, [_double, Text]),
}


def path() -> Path:
    """Return the path of the library: ``GLUON_SYNCBN_LIBRARY``, or the package's."""
    default = Path(__file__).parents[1] / "libgluon_syncbn.so"
    return Path(os.environ.get("GLUON_SYNCBN_LIBRARY", default))


def mpi_path() -> Path:
    """Return the path of the library for MPI, which only a build with MPI has."""
    return path().with_name(_MPI_NAME)


@functools.lru_cache(maxsize=None)
def load() -> ctypes.CDLL:
    file = path()
    if not os.path.exists(file):  # noqa: PTH110 - Path.exists raises for long names
        raise ImportError(
            f"{file} does not exist. Build it with {_BUILD}. If gluon_syncbn is "
            "installed, start Python outside the folder of its sources."
        )
    limit = os.environ.get("GLUON_SYNCBN_INSTRUCTION_SET")  # native code reads it
    if limit:
        limits = "generic", "avx2", "avx512"
        check_choice("GLUON_SYNCBN_INSTRUCTION_SET", limit, limits)
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        raise ImportError(
            f"{file} cannot be loaded ({error}). Build it again with {_BUILD}."
        ) from None
    declare(library, file, _SIGNATURES)
    if library.gluon_syncbn_register(mxnet_path()) != 0:
        raise ImportError(library.gluon_syncbn_last_error())
    return library


def declare(library: ctypes.CDLL, file: Path, signatures: dict) -> None:
    """Set the types of a library's functions to `signatures`.

    Raise ImportError if the library was built with another version of this file,
    because calls with wrong types corrupt memory.
    """
    found = b""
    if hasattr(library, "gluon_syncbn_build_id"):
        library.gluon_syncbn_build_id.restype = ctypes.c_char_p
        found = library.gluon_syncbn_build_id()
    if found.decode() != hashlib.sha256(Path(__file__).read_bytes()).hexdigest():
        raise ImportError(
            f"{file} was built from other sources. Build it again with {_BUILD}."
        )
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
        if result in _CONVERSIONS:
            function.errcheck = _CONVERSIONS[result]


def features() -> dict[str, Any]:
    """Return how the library was built and what it uses on this machine.

    Returns
    -------
    dict
        A dict with these keys:

        * ``version``: the package's version.
        * ``commit``: the commit that was built, with ``-dirty`` if files were changed;
          empty if it is unknown.
        * ``instruction_set``: ``"avx512"``, ``"avx2"`` or ``"generic"``, for the CPU
          kernels.
        * ``num_threads``: the number of threads that compute at once.
        * ``cuda``: True if there are CUDA kernels.
        * ``cuda_architectures``: the GPU generations with machine code (``"90-real"``,
          for all GPUs of generation 9) or PTX (``"90-virtual"``).
        * ``cuda_missing``: the reason why there are no CUDA kernels, for example the
          error of each nvcc that the build has tried, or an empty text.
        * ``mpi``: True if the library for MPI was built.
        * ``library``: the library's path.

    Examples
    --------
    >>> import gluon_syncbn
    >>> gluon_syncbn.features()["instruction_set"] in ("avx512", "avx2", "generic")
    True
    """
    library = load()
    architectures = library.gluon_syncbn_cuda_architectures().split()
    return {
        "version": __version__,
        "commit": library.gluon_syncbn_commit(),
        "instruction_set": library.gluon_syncbn_instruction_set(),
        "num_threads": library.gluon_syncbn_num_threads(),
        "cuda": bool(architectures),
        "cuda_architectures": architectures,
        "cuda_missing": library.gluon_syncbn_cuda_missing(),
        "mpi": mpi_path().exists(),
        "library": str(path()),
    }
