"""Running statistics of whole nets, recomputed after training."""
