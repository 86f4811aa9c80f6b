"""A model of the exchanges in a training step of many processes:

    seconds of one = rounds(processes) (latency + bytes / bandwidth)

Called by benchmark_exchange.py, which fits it to what it measures and extends it to
1,024 processes, and by the test that compares rounds and messages with the real ones.
"""

import numpy as np

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)

# Channels of every BatchNorm: ResNet-50's 53 layers; DeepLabV3-ResNet-50 has another
# stem, an ASPP of five branches, a projection and an auxiliary head.
_BLOCKS = ((3, 64), (4, 128), (6, 256), (3, 512))
_BODY = [c for n, c in _BLOCKS for c in [c, c, 4 * c] * n + [4 * c]]
NETS = {
    "ResNet-50": [64, *_BODY],
    "DeepLabV3-ResNet-50": [64, 64, 128, *_BODY, *[256] * 7, 256],
}


def rounds(processes):
    """Messages of an exchange that wait for one another.

    Recursive doubling takes log2(processes). Those beyond a power of two hand their
    part to a neighbour before it and get the result after it, which adds one, and two
    if they are more than half of that power.
    """
    bits = processes.bit_length() - 1
    beyond = processes - 2**bits
    return bits + (beyond > 0) + (2 * beyond > 2**bits)


def messages(processes):
    """All messages of an exchange."""
    bits = processes.bit_length() - 1
    return bits * 2**bits + 2 * (processes - 2**bits)


def fit(results, cores):
    """Latency and bandwidth of one round, by least squares of the medians."""
    fair = [r for r in results if 2 <= r["processes"] <= cores]
    seconds = [r["native"]["median_us"] * 1e-6 for r in fair]
    per_round = np.array(seconds) / [rounds(r["processes"]) for r in fair]
    size = np.array([r["kilobytes"] * 1024.0 for r in fair])
    slope, latency = np.polyfit(size, per_round, 1)
    return {
        "latency_us": round(latency * 1e6, 2),
        "bandwidth_gb_s": round(1e-9 / slope, 3) if slope > 0 else None,
    }


def step_cost(net, ranks, latency_us, bandwidth_gb_s):
    """Seconds of a step's exchanges: forward (2 C + 1) and backward (2 C) doubles."""
    total = 0.0
    for channels in NETS[net]:
        for numbers in (2 * channels + 1, 2 * channels):
            transfer = 8 * numbers / (bandwidth_gb_s * 1e9) if bandwidth_gb_s else 0.0
            total += rounds(ranks) * (latency_us * 1e-6 + transfer)
    return total


def predict(fitted):
    links = {
        "as measured here": fitted,
        "network, 10 us and 10 GB/s": {"latency_us": 10.0, "bandwidth_gb_s": 10.0},
        "network, 30 us and 1 GB/s": {"latency_us": 30.0, "bandwidth_gb_s": 1.0},
    }
    return [
        {
            "net": net,
            "link": name,
            "ranks": ranks,
            "milliseconds": round(1e3 * step_cost(net, ranks, **link), 2),
        }
        for net in NETS
        for name, link in links.items()
        for ranks in RANKS
    ]
