"""Helpers beside training: checks of replicas, of devices and of the installation.

Used by users and ``__main__.py``. No other wing may need it.
"""
