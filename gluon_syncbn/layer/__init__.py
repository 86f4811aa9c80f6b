"""SyncBatchNorm, and the conversion of whole nets to it and back."""
