"""The native library: loaded, its errors and timeouts, its engine calls, its processes.

It must not know layers, nor which devices a net runs on.
"""
