"""The public path of ``tools/monitor.py``."""

from .tools.monitor import Monitor, Waits

__all__ = ["Monitor", "Waits"]
