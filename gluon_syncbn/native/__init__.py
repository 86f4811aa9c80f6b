"""The native library: errors and timeouts, steps of trainers, signals, processes."""

from .library import load

load()  # registers the operator, so that symbols from files find it
