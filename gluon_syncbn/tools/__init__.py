"""What users call beside training: checks of replicas, devices and the installation.

Used by users and ``__main__.py``. No other wing may need it.
"""
