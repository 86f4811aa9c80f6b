"""A thread for each context, from which MXNet gets that context's work.

It must not know layers, nor what its functions compute.
"""
