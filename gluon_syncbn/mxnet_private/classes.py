"""Replaces classes by others, wherever modules have imported them.

Called by ``gluoncv``. Neither MXNet nor GluonCV has a registry of its blocks: scripts
take the classes by name from modules.
"""

from __future__ import annotations

import sys


def replace_class(former: type, new: type, own: str, but: str | None = None) -> None:
    """Replaces `former` in all modules but the package `own` and the module `but`."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == own or name == but:
            continue
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if value is former:
                setattr(module, key, new)
