"""Running statistics of whole nets, after training.

Used by users. It must not know how a layer normalizes.
"""
