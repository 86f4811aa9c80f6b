"""The SyncBatchNorm block, and the conversion of whole nets to it and back.

It must not know how devices are driven, nor how gradients get from one to another.
"""
