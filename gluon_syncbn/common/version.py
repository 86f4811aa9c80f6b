"""The version, which the build reads without importing MXNet."""

__version__ = "0.5.0"
