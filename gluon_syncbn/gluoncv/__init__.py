"""GluonCV's training scripts on several CPU contexts.

Used by users; no other wing imports it. Only `install` and what it replaces import
GluonCV. It must not know what a net computes.
"""

from .helpers import install

__all__ = ["install"]
