"""A net that runs on several devices: batches in, outputs and gradients out.

It must not know other processes, nor what a net computes.
"""
