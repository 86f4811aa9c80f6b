"""Pixel accuracy and mean intersection over union from one confusion matrix.

Counts of all batches and devices are added up first and divided last: in a mean of
batch means, the weight of an image would depend on its batch.
"""

import numpy as np


class Confusion:
    """counts[t, p]: labelled pixels of class t that were predicted as p."""

    def __init__(self, num_classes):
        self.counts = np.zeros((num_classes, num_classes), np.int64)

    def add(self, truth, prediction):
        labelled, size = truth >= 0, len(self.counts)
        code = truth[labelled].astype(np.int64) * size + prediction[labelled]
        self.counts += np.bincount(code, minlength=size * size).reshape(size, size)

    def pixel_accuracy(self):
        return float(np.trace(self.counts) / max(1, self.counts.sum()))

    def class_iou(self):
        """IoU of each class, NaN for one that is neither there nor predicted."""
        hit = np.diag(self.counts)
        union = self.counts.sum(0) + self.counts.sum(1) - hit
        return np.where(union > 0, hit / np.maximum(union, 1), np.nan)

    def mean_iou(self):
        """The mean over the classes that are there or were predicted."""
        return float(np.nanmean(self.class_iou()))
