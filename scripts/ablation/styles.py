"""Colours and small helpers of both figures. Called by figures.py and details.py."""

# The name in the results: label, colour, marker.
NORMS = {
    "bn": ("nn.BatchNorm, each device by itself", "tab:gray", "s"),
    "syncbn": ("SyncBatchNorm", "tab:blue", "o"),
}
ONE_DEVICE = "one device, whole batch", "black", "_"
STYLES = {**NORMS, "contrib": ("contrib SyncBatchNorm", "tab:orange", "^")}


def finish(axis):
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def of_arm(found, norm, devices, images):
    """The runs of an arm, one for each seed."""
    key = norm, devices, images
    return [r for r in found if (r["norm"], r["devices"], r["images"]) == key]
