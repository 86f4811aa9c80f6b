#!/usr/bin/env python3
"""Measures the latency of exchanges, and estimates their cost in a step of many ranks.

    python scripts/benchmarks/benchmark_exchange.py  # writes scripts/results/
    python scripts/benchmarks/benchmark_exchange.py --plot  # only draws

Measures the rendezvous of 2 to 8 threads, and the exchange between 1 to 4 processes of
this machine from array to array, for 1 to 16 KB, each verified before it is timed. To
the processes it fits

    seconds = rounds(processes) (latency + bytes / bandwidth)

and extends that to 8 to 1,024 processes. The table states what it assumes.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # a checkout that is not installed

RESULT = ROOT / "scripts/results/benchmark_exchange.json"
KILOBYTES = (1, 4, 16)
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
    part to a neighbour before it and get the result behind it, which adds one, and two
    if they are more than half of that power.
    """
    bits = processes.bit_length() - 1
    beyond = processes - 2**bits
    return bits + (beyond > 0) + (2 * beyond > 2**bits)


def messages(processes):
    """All messages of an exchange."""
    bits = processes.bit_length() - 1
    return bits * 2**bits + 2 * (processes - 2**bits)


def percentiles(seconds):
    import numpy as np

    low, median, high, tail = np.percentile(seconds, [10, 50, 90, 99]) * 1e6
    return {
        "p10_us": round(float(low), 1),
        "median_us": round(float(median), 1),
        "p90_us": round(float(high), 1),
        "p99_us": round(float(tail), 1),
        "repetitions": len(seconds),
    }


def time_calls(call, repetitions):
    import time

    for _ in range(repetitions // 10):
        call()
    seconds = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return seconds


def measure_processes(output, repetitions):
    """Runs on every rank: the native exchange from array to array; rank 0 writes."""
    import numpy as np

    from gluon_syncbn import distributed
    from gluon_syncbn.native.library import load

    distributed.init()
    library = load()
    results = []
    for kilobytes in KILOBYTES:
        array = np.arange(kilobytes * 128, dtype=np.float64)
        total = np.empty_like(array)
        size = ctypes.c_int64()

        def call(array=array, total=total, size=size):
            library.gluon_syncbn_distributed_exchange(
                *(b"benchmark", b"", b"sum_float64", array.ctypes.data, array.nbytes),
                *(60.0, ctypes.byref(size)),
            )
            library.gluon_syncbn_distributed_result(total.ctypes.data)

        call()
        np.testing.assert_array_equal(total, array * distributed.size())
        native = time_calls(call, repetitions)
        python = time_calls(lambda a=array: distributed.allreduce(a), repetitions)
        results.append(
            {
                "processes": distributed.size(),
                "kilobytes": kilobytes,
                "native": percentiles(native),
                "python": percentiles(python),
            }
        )
    if distributed.rank() == 0:
        Path(output).write_text(json.dumps(results))


def measure_threads(repetitions):
    """The native rendezvous of a layer: a program that is compiled here."""
    with tempfile.TemporaryDirectory() as build:
        sources = [ROOT / "scripts/benchmarks/benchmark_rendezvous.cc"]
        sources += (ROOT / "src/collective").glob("*.cc")
        # All as one: their headers take most of the time.
        whole, program = (Path(build) / name for name in ("whole.cc", "benchmark"))
        whole.write_text("".join(f'#include "{source}"\n' for source in sources))
        command = ["g++", "-O3", "-std=c++17", "-pthread", f"-I{ROOT / 'src'}"]
        subprocess.run([*command, whole, "-o", program], check=True)
        output = subprocess.run(
            [program, str(repetitions)], check=True, capture_output=True, text=True
        )
    results = []
    for line in output.stdout.splitlines():
        threads, kilobytes, *seconds = line.split()
        results.append(
            {
                "threads": int(threads),
                "kilobytes": int(kilobytes),
                **percentiles([float(s) for s in seconds]),
            }
        )
    return results


def fit(results, cores):
    """Latency and bandwidth of one round, by least squares of the medians."""
    import numpy as np

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


def table(data):
    lines = ["| what | KB | median, us | p90 | p99 |", "|---|---|---|---|---|"]
    for r in data["threads"]:
        lines.append(
            f"| {r['threads']} threads | {r['kilobytes']} | {r['median_us']} | "
            f"{r['p90_us']} | {r['p99_us']} |"
        )
    for r in data["processes"]:
        for kind in "native", "python":
            lines.append(
                f"| {r['processes']} processes, {kind} | {r['kilobytes']} | "
                f"{r[kind]['median_us']} | {r[kind]['p90_us']} | {r[kind]['p99_us']} |"
            )
    ranks = " | ".join(map(str, RANKS))
    lines += ["", f"| ms of a step, by ranks | {ranks} |", "|---" * 9 + "|"]
    for net in NETS:
        for link in dict.fromkeys(p["link"] for p in data["model"]):
            values = [
                str(p["milliseconds"])
                for p in data["model"]
                if (p["net"], p["link"]) == (net, link)
            ]
            lines.append(f"| {net}, {link} | {' | '.join(values)} |")
    return "\n".join([*lines, "", *data["assumptions"]])


def plot(data, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(NETS), figsize=(10, 4), sharey=True)
    for axis, net in zip(axes, NETS):
        for link in dict.fromkeys(p["link"] for p in data["model"]):
            points = [p for p in data["model"] if (p["net"], p["link"]) == (net, link)]
            axis.semilogx(
                [p["ranks"] for p in points],
                [p["milliseconds"] for p in points],
                "o-",
                base=2,
                label=link,
            )
        axis.set(title=f"{net}, {len(NETS[net])} layers", xlabel="processes")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("exchanges of one step, ms (model)")
    axes[0].set_ylim(bottom=0)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def launch(processes, repetitions):
    beside = Path(sys.executable).with_name("mpirun")
    launcher = [str(beside) if beside.exists() else "mpirun"]
    version = subprocess.run([*launcher, "--version"], capture_output=True, text=True)
    if "HYDRA" not in version.stdout:
        launcher += ["--allow-run-as-root", "--oversubscribe"]
    with tempfile.NamedTemporaryFile() as output:
        program = [sys.executable, __file__, "--rank-output", output.name]
        subprocess.run(
            [*launcher, "-n", str(processes), *program]
            + ["--repetitions", str(repetitions)],
            check=True,
            timeout=300,
        )
        return json.loads(Path(output.name).read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=2000)
    parser.add_argument("--plot", action="store_true", help="only draw")
    parser.add_argument(
        "--output", type=Path, default=RESULT, help="JSON; figure beside"
    )
    parser.add_argument("--rank-output", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_output:
        return measure_processes(options.rank_output, options.repetitions)
    if not options.plot:
        from benchmarking import machine

        processes = [r for n in (1, 2, 3, 4) for r in launch(n, options.repetitions)]
        cores = len(os.sched_getaffinity(0))
        fitted = fit(processes, cores)
        data = {
            "machine": machine(),
            "threads": measure_threads(options.repetitions),
            "processes": processes,
            "fit": fitted,
            "assumptions": [
                f"Fitted to runs of 2 to {cores} processes on {cores} cores: "
                f"{fitted['latency_us']} us and {fitted['bandwidth_gb_s']} GB/s a "
                "round, within one machine. More processes than cores take turns and "
                "are not fitted.",
                "The model: every layer makes one exchange in forward and one in "
                "backward, none of them overlap each other or computation, all ranks "
                "come at once, and each of log2(ranks) rounds costs the same. "
                "The time that a rank waits for slower ones is not included. The two "
                "networks are assumed, not measured.",
            ],
        }
        data["model"] = predict(fitted)
        options.output.write_text(json.dumps(data, indent=1) + "\n")
    data = json.loads(options.output.read_text())
    print(table(data))
    figure = options.output.with_suffix(".png")
    plot(data, figure)
    print(f"\n{options.output}\n{figure}")
    return None


if __name__ == "__main__":
    sys.exit(main())
