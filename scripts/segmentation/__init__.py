"""Parts of the segmentation scripts: one file, one idea.

`scripts/train_segmentation.py` and `scripts/predict.py` wire them together. Nothing
here is installed with the package `gluon_syncbn`, or knows how a layer synchronizes.
"""
