"""Parts of scripts/ablation.py, which says what they are for: one file, one idea.

A run is a folder of train_segmentation.py and one JSON with its result; figures and
tables come from those JSON alone.
"""
