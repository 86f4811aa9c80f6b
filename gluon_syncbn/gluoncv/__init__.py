"""GluonCV's helpers for several devices, replaced by ones that work on CPUs too.

Used by users of GluonCV's training scripts; only `install` and calls import GluonCV.
No other wing imports it. It must not know what a net computes.
"""

from .data_parallel import DataParallelCriterion, DataParallelModel
from .executor import Parallel
from .installing import install

__all__ = ["DataParallelCriterion", "DataParallelModel", "Parallel", "install"]
