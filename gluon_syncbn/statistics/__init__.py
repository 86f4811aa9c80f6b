"""Running statistics of whole nets, after training.

It must not know how a layer normalizes.
"""
