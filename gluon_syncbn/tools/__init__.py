"""Helpers beside training: checks of replicas, of devices and of the installation.

No other wing may need it.
"""
