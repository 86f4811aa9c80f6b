"""Nets on several devices: parallel nets, plain loops, and the devices' threads."""
