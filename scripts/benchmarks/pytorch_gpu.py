"""PyTorch's kernels and layers on one GPU, for benchmark_gpu.py.

Kernels are the four of PyTorch's synchronized batch norm. Layers are forward and
backward, with gradients of gamma and beta: `F.batch_norm` with PyTorch's own kernels
and with cuDNN's, and the function that `torch.nn.SyncBatchNorm` calls, in a group of
this process alone. (The module itself would call `F.batch_norm` there.) All are timed
as benchmark_gpu.cc times ours.
"""

import statistics

try:
    import torch
    from torch.nn import functional
    from torch.nn.modules._functions import SyncBatchNorm
except ImportError:
    torch = None
if torch and not torch.cuda.is_available():
    torch = None

MEMORY_FORMATS = {"contiguous": "contiguous_format", "channels-last": "channels_last"}
PAIRS = {"forward": ("moments", "normalize"), "backward": ("sums", "apply")}
LAYERS = "native", "cuDNN", "SyncBatchNorm"
EPSILON, MOMENTUM = 1e-5, 0.1
WARM_UP = 3  # as in benchmark_gpu.cc


class Batch:
    """Random tensors of one case."""

    def __init__(self, shape, dtype, layout):
        options = {"dtype": getattr(torch, dtype), "device": "cuda"}
        options["memory_format"] = getattr(torch, MEMORY_FORMATS[layout])
        self.x, self.dy = (
            torch.empty(shape, **options).normal_(mean, 1) for mean in (3.0, 0.0)
        )
        self.gamma, self.beta = torch.rand(2, shape[1], device="cuda") + 0.5


def kernels(batch):
    """The four kernels, and the pairs that are a forward and a backward."""
    x, gamma = batch.x, batch.gamma
    mean, inv_std = torch.batch_norm_stats(x, EPSILON)
    count = torch.tensor([x.numel() // x.shape[1]], dtype=torch.int32, device=x.device)
    backward = batch.dy, x, mean, inv_std, gamma

    def reduce():
        return torch.batch_norm_backward_reduce(*backward, True, True, True)

    sums = reduce()[:2]
    steps = {
        "moments": lambda: torch.batch_norm_stats(x, EPSILON),
        "normalize": lambda: torch.batch_norm_elemt(
            x, gamma, batch.beta, mean, inv_std, EPSILON
        ),
        "sums": reduce,
        "apply": lambda: torch.batch_norm_backward_elemt(*backward, *sums, count),
    }
    for pair, names in PAIRS.items():
        both = [steps[name] for name in names]
        steps[pair] = lambda both=both: [step() for step in both]
    return steps


def layer(name, batch, group):
    """Forward and backward of one of LAYERS."""
    inputs = [t.detach().requires_grad_() for t in (batch.x, batch.gamma, batch.beta)]
    running = torch.zeros_like(batch.gamma), torch.ones_like(batch.gamma)

    def forward():
        x, gamma, beta = inputs
        if name == "SyncBatchNorm":
            options = EPSILON, MOMENTUM, group, 1
            return SyncBatchNorm.apply(x, gamma, beta, *running, *options)
        with torch.backends.cudnn.flags(enabled=name == "cuDNN"):
            return functional.batch_norm(
                x, *running, gamma, beta, True, MOMENTUM, EPSILON
            )

    y = forward()

    def backward():
        with torch.backends.cudnn.flags(enabled=name == "cuDNN"):
            torch.autograd.grad(y, inputs, batch.dy, retain_graph=True)

    return {"forward": forward, "backward": backward}


def group_of_this_process():
    """For SyncBatchNorm; None, and a line that says why, where NCCL does not start."""
    try:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
        torch.distributed.all_reduce(torch.zeros(1, device="cuda"))
    except RuntimeError as error:
        print(f"torch.nn.SyncBatchNorm is left out: {error}")
        return None
    return torch.distributed.group.WORLD


class PyTorch:
    """Times PyTorch after writes of `flush_bytes`, which empty the cache."""

    def __init__(self, flush_bytes, repetitions):
        self._flush = torch.empty(flush_bytes, dtype=torch.uint8, device="cuda")
        self._repetitions = repetitions
        self._group = group_of_this_process()

    def times(self, shape, dtype, layout):
        """Median microseconds of the kernels and of each layer."""
        batch = Batch(shape, dtype, layout)
        names = [
            name
            for name in LAYERS
            if self._group is not None or name != "SyncBatchNorm"
        ]
        layers = {
            name: self._median_times(layer(name, batch, self._group)) for name in names
        }
        return self._median_times(kernels(batch)), layers

    def _median_times(self, steps):
        times = {
            name: round(1e6 * self._seconds(step), 3) for name, step in steps.items()
        }
        return {**times, "all": round(times["forward"] + times["backward"], 3)}

    def _seconds(self, step):
        times = []
        for repetition in range(WARM_UP + self._repetitions):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # Long enough for the host to queue the rest meanwhile.
            self._flush.fill_(repetition % 256)
            start.record()
            step()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times[WARM_UP:])
