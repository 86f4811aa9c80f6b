"""Nets on several devices: they take whole batches and return joined outputs."""
