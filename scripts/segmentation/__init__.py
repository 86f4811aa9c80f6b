"""Parts of the segmentation scripts; they know nothing of how a layer synchronizes."""
