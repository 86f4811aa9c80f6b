"""Draw the figures of README and pages: docs/figures/*.svg.

    python docs/figures.py

Lines have colors that are readable on white and on black, and text follows the color
scheme of the page (docs/_static/site.css) or of the system.
"""

import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "scripts" / "results"
INK, DEVICES, WAIT = "#7d7d7d", ("#2f86d2", "#d97a1a"), "#cf4a3f"
STYLE = "text{fill:#333}@media(prefers-color-scheme:dark){text{fill:#ddd}}"


class Figure:
    def __init__(self, width, height, title):
        self.width, self.height, self.title, self.items = width, height, title, []

    def text(self, x, y, words, anchor="middle", weight="normal"):
        self.items.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" '
            f'font-weight="{weight}">{words}</text>'
        )

    def box(self, x, y, width, height, color, words="", opacity=0.18, dash=""):
        """Draw a box with lines of text in its center."""
        self.items.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" '
            f'fill="{color}" fill-opacity="{opacity}" stroke="{color}" '
            f'stroke-width="1.5" stroke-dasharray="{dash}"/>'
        )
        lines = words.split("\n") if words else []
        for i, line in enumerate(lines):
            middle = y + height / 2 + 6 + 21 * (i - (len(lines) - 1) / 2)
            self.text(x + width / 2, middle, line)

    def arrow(self, x1, y1, x2, y2, color=INK):
        self.items.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" '
            'stroke-width="1.8" marker-end="url(#head)"/>'
        )

    def save(self, name):
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/>'
            "</marker>"
        )
        body = "\n".join(self.items)
        (HERE / "figures" / f"{name}.svg").write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} '
            f'{self.height}" width="{self.width}" height="{self.height}" '
            'font-family="Helvetica, Arial, sans-serif" font-size="18" role="img">\n'
            f"<title>{self.title}</title>\n<style>{STYLE}</style>\n<defs>{head}</defs>\n{body}\n</svg>\n"
        )


def synchronization():
    """Draw how one layer computes a training step on two devices."""
    f = Figure(640, 300, "Two devices exchange moments forward and sums backward")
    for i, y in enumerate((20, 210)):
        color = DEVICES[i]
        f.box(10, y, 110, 56, color, f"cpu({i})\nshard of x")
        f.box(170, y, 120, 56, color, "count, mean,\nvariance")
        f.box(350, y, 120, 56, color, "normalize by\nthe total")
        f.box(520, y, 110, 56, color, "y")
        for left, right in ((122, 167), (472, 517)):
            f.arrow(left, y + 28, right, y + 28)
    f.box(205, 117, 230, 52, INK, "total of all devices", 0.1)
    f.arrow(230, 78, 230, 114)
    f.arrow(230, 208, 230, 172)
    f.arrow(410, 116, 410, 79)
    f.arrow(410, 170, 410, 207)
    for i, line in enumerate(("forward: one", "exchange of", "moments")):
        f.text(20, 128 + 22 * i, line, "start")
    for i, line in enumerate(("backward: one", "exchange of", "two sums")):
        f.text(620, 128 + 22 * i, line, "end")
    f.save("synchronization")


def tree():
    """Draw the tree of ranks, with each rank's devices as leaves."""
    f = Figure(640, 250, "Ranks form a tree, and the devices of a rank are its leaves")
    f.box(240, 15, 160, 44, INK, "rank 0 (root)", 0.1)
    for i, x in enumerate((250, 350)):
        f.box(x, 95, 82, 36, DEVICES[i], f"cpu({i})")
        f.arrow(x + 41, 94, 290 + 60 * i, 62)
    for rank, x in ((1, 20), (2, 460)):
        f.box(x, 95, 160, 44, INK, f"rank {rank}", 0.1)
        f.arrow(x + 80, 94, 238 if rank == 1 else 402, 50)
        for i in range(2):
            f.box(x + 84 * i - 4, 180, 80, 36, DEVICES[i], f"cpu({i})")
            f.arrow(x + 84 * i + 36, 179, x + 50 + 60 * i, 142)
    f.text(320, 180, "up: parts, in this order")
    f.text(320, 202, "down: the total")
    f.save("tree")


def wait():
    """Draw why a read inside the loop over contexts never ends."""
    f = Figure(640, 220, "A read inside the loop waits for a device that has no work")
    for name, y in (("program", 50), ("cpu(0)", 110), ("cpu(1)", 170)):
        f.text(10, y + 5, name, "start", weight="bold")
    f.box(90, 30, 110, 40, INK, "net(x0)", 0.1)
    f.box(205, 30, 425, 40, WAIT, "loss.asscalar() waits for cpu(0)", dash="5 4")
    f.box(130, 90, 100, 40, DEVICES[0], "moments")
    f.box(235, 90, 395, 40, WAIT, "waits for the moments of cpu(1)", dash="5 4")
    f.box(90, 150, 540, 40, INK, "no work: net(x1) comes after the read", 0.03, "5 4")
    f.text(360, 212, "time")
    f.arrow(385, 207, 440, 207)
    f.save("wait")


def device_waits():
    """Draw why a device with less work waits in each layer."""
    f = Figure(640, 200, "A device with less work waits in each layer for the slowest")
    for x, layer in ((330, "batchnorm0"), (570, "batchnorm1")):
        f.text(x + 10, 24, layer)
        f.box(x, 34, 20, 122, INK, opacity=0.1)
    for i, (y, ends) in enumerate(((45, (235, 430)), (105, (325, 565)))):
        f.text(10, y + 25, f"cpu({i})", "start", weight="bold")
        f.box(80, y, 60, 40, INK, "data", 0.1)
        for start, end, exchange in zip((145, 355), ends, (330, 570)):
            f.box(start, y, end - start, 40, DEVICES[i], "works")
            if end < exchange - 5:
                f.box(end + 5, y, exchange - end - 10, 40, WAIT, "waits", dash="5 4")
    f.text(300, 188, "time")
    f.arrow(325, 183, 380, 183)
    f.save("device_waits")


def cost():
    """Draw the time of a step relative to nn.BatchNorm: lowest to highest mode."""
    rows = json.loads((RESULTS / "benchmark_net.json").read_text())["rows"]
    ratios = {}
    for row, base in zip(rows[::2], rows[1::2]):
        ratio = row["median_ms"] / base["median_ms"]
        if row["update"]:
            ratios.setdefault(row["net"], {}).setdefault(row["layer"], []).append(ratio)
    f = Figure(640, 60 + 84 * len(ratios), "Time of a step relative to nn.BatchNorm")

    def x_of(ratio):
        return 160 + 135 * ratio

    bottom = 25 + 84 * len(ratios)
    for tick in range(4):
        f.box(x_of(tick), 12, 0.01, bottom - 12, INK, opacity=0)
        f.text(x_of(tick), bottom + 20, f"{tick}x")
    for i, (net, layers) in enumerate(ratios.items()):
        y = 24 + 84 * i
        f.text(10, y + 36, net, "start", weight="bold")
        for j, (layer, values) in enumerate(layers.items()):
            color, low, high = DEVICES[j], min(values), max(values)
            f.box(x_of(0), y + 32 * j, x_of(low) - x_of(0), 26, color, opacity=0.45)
            f.box(x_of(low), y + 32 * j, x_of(high) - x_of(low), 26, color)
            name = "gluon_syncbn" if layer == "gluon_syncbn" else "MXNet's layer"
            f.text(x_of(0) + 8, y + 32 * j + 18, name, "start")
    f.save("cost")


if __name__ == "__main__":
    (HERE / "figures").mkdir(exist_ok=True)
    for draw in (synchronization, tree, wait, device_waits, cost):
        draw()
