"""Times the CUDA kernels beside a plain copy and PyTorch's, in one run on one GPU.

PyTorch's are the four kernels of its synchronized batch norm: batch_norm_stats,
batch_norm_elemt, batch_norm_backward_reduce, batch_norm_backward_elemt. No MXNet takes
part. Each kernel is compared with float64 on the same data first, and timed only if it
is right. Then kernels take turns; before each, the second-level cache is overwritten.
Times are those of CUDA events. "forward" and "backward" are two kernels in a row, the
second of which may find in the cache what the first has read; "all" is their sum. Bytes
are those that a kernel must read and write: 1, 2, 2 and 3 tensors.

    python scripts/benchmark_gpu.py                    # the table of the README
    python scripts/benchmark_gpu.py --shape 4,64,240,240 --repetitions 50
"""

import argparse
import json
import platform
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

try:
    import torch
except ImportError:
    sys.exit("benchmark_gpu.py needs PyTorch, for memory and to compare with")
if not torch.cuda.is_available():
    sys.exit("benchmark_gpu.py needs a CUDA device, and PyTorch sees none")

import native  # noqa: E402
import reference  # noqa: E402
from cuda_driver import LANE, CudaDriver  # noqa: E402
from native import NONE, SHAPE  # noqa: E402

EPS = 1e-5
# (N, C, H, W): the layers of a dilated ResNet-50 and of its pyramid pooling, for 4
# crops of 480; then others, large and small.
SHAPES = [
    (4, 64, 240, 240),
    (4, 256, 120, 120),
    (4, 512, 60, 60),
    (4, 1024, 60, 60),
    (4, 2048, 60, 60),
    (4, 512, 6, 6),
    (4, 512, 1, 1),
    (16, 256, 129, 129),
    (32, 64, 256, 256),
    (2, 32, 512, 1024),
    (64, 2048, 7, 7),
]
DTYPES = {"float32": torch.float32, "float16": torch.float16}
TENSORS = {"moments": 1, "normalize": 2, "sums": 2, "apply": 3}
PAIRS = {"forward": ("moments", "normalize"), "backward": ("sums", "apply")}


class Pointer:
    """A tensor as an argument of a kernel."""

    def __init__(self, tensor):
        self.pointer = tensor.data_ptr()


class Case:
    """One shape, dtype and layout: data, expected values, and both sets of kernels."""

    def __init__(self, shape, dtype, layout):
        n, c, h, w = shape
        self.dtype, self.count = dtype, n * h * w
        last = layout == "channels-last"
        self.shape = (n * h * w, c, 1) if last else (n, c, h * w)
        options = {"dtype": DTYPES[dtype], "device": "cuda"}
        form = torch.channels_last if last else torch.contiguous_format
        self.x, self.dy = (
            torch.empty(shape, memory_format=form, **options).normal_(mean, 1)
            for mean in (3.0, 0.0)
        )
        self.y, self.dx = torch.empty_like(self.x), torch.empty_like(self.x)
        self.y.fill_(float("nan"))
        self.dx.fill_(float("nan"))
        self.gamma, self.beta = torch.rand(2, c, device="cuda") + 0.5
        self.driver = CudaDriver()
        size = self.driver.workspace_bytes(dtype, self.shape)
        self.scratch = torch.zeros(size, dtype=torch.uint8, device="cuda")
        self._expect()
        self._prepare_torch()
        self.results = torch.full((4, c), float("nan"), device="cuda").double()
        self.bytes = self.x.numel() * self.x.element_size()

    def _expect(self):
        """Moments and gradients of the batch in float64, and what kernels are given."""
        axes, form = (0, 2, 3), (1, -1, 1, 1)
        x, dy = self.x.double(), self.dy.double()
        self.mean, var = x.mean(axes), x.var(axes, correction=0)
        self.m2 = var * self.count
        self.inv_std = 1 / torch.sqrt(var + EPS)
        xmu = x - self.mean.view(form)
        self.sum_dy, self.sum_dy_xmu = dy.sum(axes), (dy * xmu).sum(axes)
        self.absolute = dy.abs().sum(axes)
        self.a = self.gamma.double() * self.inv_std
        self.offset = self.beta.double()
        self.b = -self.a * self.inv_std**2 * self.sum_dy_xmu / self.count
        self.d = -self.a * self.sum_dy / self.count
        a, b, d, offset = (v.view(form) for v in (self.a, self.b, self.d, self.offset))
        self.expected_y = xmu * a + offset
        self.expected_dx = a * dy + b * xmu + d

    def _prepare_torch(self):
        self.means, self.inv_stds = self.mean.float(), self.inv_std.float()
        self.counts = torch.tensor([self.count], dtype=torch.int32, device="cuda")
        self.sums = self.sum_dy.float(), self.sum_dy_xmu.float()

    def _call(self, name, *arguments):
        pointers = (Pointer(a) if torch.is_tensor(a) else a for a in arguments)
        if self.driver.call(name, self.dtype, self.shape, *pointers) != 0:
            sys.exit(native.last_error())

    def ours(self):
        """Functions that queue our kernels."""
        mean, m2, sum_dy, sum_dy_xmu = self.results
        given = self.x, self.dy, SHAPE, *NONE.arguments(), None, None, self.mean
        affine = self.mean, self.a, self.offset, *NONE.arguments()[:2]
        return {
            "moments": lambda: self._call(
                "local_moments", self.x, SHAPE, self.scratch, mean, m2
            ),
            "normalize": lambda: self._call(
                "normalize", self.x, SHAPE, *affine, 0, self.y
            ),
            "sums": lambda: self._call(
                "backward_sums", *given, self.scratch, sum_dy, sum_dy_xmu
            ),
            "apply": lambda: self._call(
                "backward_apply", *given, self.a, self.b, self.d, 0, self.dx
            ),
        }

    def torchs(self):
        """Functions that queue PyTorch's kernels."""
        x, dy, gamma, mean = self.x, self.dy, self.gamma, self.means
        inv_std = self.inv_stds
        return {
            "moments": lambda: torch.batch_norm_stats(x, EPS),
            "normalize": lambda: torch.batch_norm_elemt(
                x, gamma, self.beta, mean, inv_std, EPS
            ),
            "sums": lambda: torch.batch_norm_backward_reduce(
                dy, x, mean, inv_std, gamma, True, True, True
            ),
            "apply": lambda: torch.batch_norm_backward_elemt(
                dy, x, mean, inv_std, gamma, *self.sums, self.counts
            ),
        }

    def verify(self):
        """Exits unless each of our kernels is right."""
        for kernel in self.ours().values():
            kernel()
        mean, m2, sum_dy, sum_dy_xmu = self.results
        far = float(self.mean.abs().max() * self.inv_std.max())
        lane = min(LANE, self.count)
        _, atol = reference.tolerance(self.dtype, self.count, far, 1.0, lane)
        u_out, _ = reference.tolerance(self.dtype)
        largest = float((self.x.double().abs().max() + 3) * self.inv_std.max() * 3)
        gradients = float(self.a.abs().max() * self.dy.abs().max()) * (1 + largest)
        checks = {
            "mean": ((mean - self.mean) * self.inv_std, atol),
            "m2": (m2 / self.m2 - 1, atol),
            "sum_dy": ((sum_dy - self.sum_dy) / self.absolute, atol),
            "sum_dy_xmu": (
                (sum_dy_xmu - self.sum_dy_xmu) * self.inv_std / self.absolute / largest,
                atol,
            ),
            "y": (self.y.double() - self.expected_y, largest * (8 * 2**-24 + u_out)),
            "dx": (
                self.dx.double() - self.expected_dx,
                gradients * (8 * 2**-24 + u_out),
            ),
        }
        for name, (error, bound) in checks.items():
            worst = float(error.abs().max())
            if not worst <= bound:
                sys.exit(f"{name} of {self.shape} {self.dtype} is wrong by {worst}")
        del self.expected_y, self.expected_dx


def seconds_of(function, flush, repetitions):
    """Median seconds of what `function` queues, the cache overwritten before each."""
    times = []
    for repetition in range(3 + repetitions):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.fill_(repetition)  # long enough for the host to queue the rest meanwhile
        start.record()
        function()
        end.record()
        end.synchronize()
        if repetition >= 3:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measure(case, flush, repetitions):
    """Microseconds of each kernel and pair, ours and PyTorch's."""
    row = {}
    for who, kernels in ("ours", case.ours()), ("torch", case.torchs()):
        steps = dict(kernels)
        for pair, (first, second) in PAIRS.items():
            steps[pair] = lambda a=kernels[first], b=kernels[second]: (a(), b())
        times = {name: seconds_of(s, flush, repetitions) for name, s in steps.items()}
        times["all"] = times["forward"] + times["backward"]
        row[who] = {name: round(1e6 * value, 2) for name, value in times.items()}
    row["gb_s"] = {
        name: round(count * case.bytes / row["ours"][name] / 1e3, 1)
        for name, count in TENSORS.items()
    }
    return row


def copy_gb_s(flush, repetitions):
    """Bytes read plus bytes written of a large device-to-device copy, over time."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), flush, repetitions)
    return round(2 * source.numel() / seconds / 1e9, 1)


def print_row(row, copy):
    cells = [f"{str(tuple(row['shape'])):<22}{row['dtype']:<9}{row['layout']:<14}"]
    for name in TENSORS:
        ours, other = row["ours"][name], row["torch"][name]
        cells.append(f"{ours:9.1f} {row['gb_s'][name] / copy:4.0%} {other:8.1f} ")
    faster = row["torch"]["all"] / row["ours"]["all"]
    print("".join(cells) + f"{faster:6.2f} x", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", help="N,C,H,W; default: the table's")
    parser.add_argument("--repetitions", type=int, default=30)
    results = ROOT / "scripts" / "results" / "benchmark_gpu.json"
    parser.add_argument("--output", type=Path, default=results)
    options = parser.parse_args()
    shapes = SHAPES
    if options.shape:
        shapes = [tuple(int(size) for size in options.shape.split(","))]
    properties = torch.cuda.get_device_properties(0)
    flush = torch.empty(4 * properties.L2_cache_size + 2**28, dtype=torch.uint8).cuda()
    copy = copy_gb_s(flush, options.repetitions)
    print(f"{properties.name}: copy {copy} GB/s")
    print(
        "of each kernel: microseconds, share of the copy's GB/s, PyTorch's microseconds"
    )
    rows = []
    for shape in shapes:
        for dtype in DTYPES:
            for layout in "contiguous", "channels-last":
                case = Case(shape, dtype, layout)
                case.verify()
                row = {"shape": list(shape), "dtype": dtype, "layout": layout}
                row.update(measure(case, flush, options.repetitions))
                rows.append(row)
                print_row(row, copy)
    architectures = native.library().gluon_syncbn_cuda_architectures().decode()
    document = {
        "machine": {
            "gpu": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "architectures": architectures,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "copy_gb_s": copy,
        "repetitions": options.repetitions,
        "rows": rows,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
