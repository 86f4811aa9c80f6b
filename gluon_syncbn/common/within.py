"""The contexts of the `Devices.map` that the calling thread works for."""

from __future__ import annotations

import threading
from typing import Any, Sequence


class _Within(threading.local):
    contexts: Sequence[Any] = ()  # of the innermost map


within = _Within()
