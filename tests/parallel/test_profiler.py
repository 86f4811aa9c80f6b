"""MXNet's profiler shows a layer's phases, and how long devices wait in each."""

import json
from collections import Counter

from gluon_syncbn.common.mxnet_version import IS_GLUON_2

import mxnet as mx
import pytest
from support.helpers import output_of
from support.mpi import needs_mpi, run_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(mx.base._LIB, "_ZN5mxnet8profiler8Profiler3GetEPSt10shared_ptrIS1_E"),
    reason="this MXNet, such as 1.6.0, does not tell whether its profiler runs",
)

# Of three steps the profiler sees the second one. cpu(1) comes late to each layer, in
# forward and in backward. Prints how long devices waited in each, as Monitor says.
PROGRAM = """
import gluon_syncbn, json, sys, time
import mxnet as mx
from mxnet import gluon
from mxnet.gluon import nn
from support.blocks import Function
from support.helpers import cpus, differentiate
from support.nd import nd

class Late(mx.operator.CustomOp):
    def __init__(self, ctx):
        self.rests = 0.1 if "cpu(1)" in str(ctx) else 0
    def forward(self, is_train, req, in_data, out_data, aux):
        time.sleep(self.rests)
        self.assign(out_data[0], req[0], in_data[0])
    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.forward(True, req, out_grad, in_grad, aux)

@mx.operator.register("late")
class LateProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return Late(ctx)

class BeLate(Function):
    def compute(self, F, x):
        return F.Custom(x, op_type="late")

net = nn.HybridSequential()
for _ in range(2):
    net.add(BeLate(), nn.BatchNorm())
net.add(BeLate(), nn.Dense(2))
net = gluon_syncbn.make_parallel(net, cpus(devices))
net.initialize()
net.hybridize(static_alloc=static, static_shape=static)
trainer_of = gluon.Trainer if devices > 1 else gluon_syncbn.distributed.Trainer
trainer = trainer_of(net.collect_params(), "sgd")
mx.profiler.set_config(profile_all=True, filename=trace)

def step():
    with gluon_syncbn.Monitor(net) as monitor:
        for x in monitor.data([nd.random.normal(shape=(4, 3))]):
            differentiate(lambda x: (net(x) ** 2).sum(), x)
            trainer.step(4)
        mx.nd.waitall()
        waits = monitor.report()
    return {name: share * devices * waits.seconds for name, share in waits.layers}

step()  # as long as the profiler was never started, MXNet keeps what tasks measure
mx.profiler.set_state("run")
seconds = step()
mx.profiler.set_state("stop")
step()
mx.profiler.dump()
print(json.dumps(seconds))
"""
LAYERS = ("1", "3") if IS_GLUON_2 else ("batchnorm0", "batchnorm1")


def tasks_of(trace):
    """(name, begin, end, thread) of each task, in microseconds, by category."""
    begun, found = {}, {}
    for event in json.loads(trace.read_text())["traceEvents"]:
        key = event.get("cat"), event["name"], event.get("tid")
        if event["ph"] == "b":
            begun[key] = event["ts"]
        elif event["ph"] == "e":
            task = event["name"], begun.pop(key), event["ts"], event["tid"]
            found.setdefault(event["cat"], []).append(task)
    return found


@pytest.mark.parametrize("static", [False, True])
def test_a_trace_shows_each_phase_and_how_long_devices_wait(static, tmp_path):
    trace = tmp_path / "trace.json"
    given = f"trace, devices, static = {str(trace)!r}, 2, {static}\n"
    seconds = json.loads(output_of(given + PROGRAM))
    tasks = tasks_of(trace)
    operators = [t for t in tasks["Custom Operator"] if "gluon_syncbn::" in t[0]]
    waits = Counter()
    for device in "cpu(0)", "cpu(1)":
        # Of the one step that the profiler has seen.
        own = tasks[f"SyncBatchNorm {device}"]
        phases = ["local pass", "wait for others", "second pass"]
        if device == "cpu(1)":
            phases.remove("wait for others")
        assert Counter(name for name, *_ in own) == Counter(
            f"{what}, {phase} of {layer} on {device}"
            for what in phases
            for phase in ("forward", "backward")
            for layer in LAYERS
        )
        own.sort(key=lambda task: task[1])
        for before, after in zip(own, own[1:]):
            assert before[2] <= after[1]
        for name, begin, end, thread in own:
            outer = [t for t in operators if t[3] == thread and t[1] <= begin <= t[2]]
            assert len(outer) == 1 and end <= outer[0][2]
            if name.startswith("wait"):
                waits[name.split(" of ")[1].split()[0]] += (end - begin) / 1e6
    assert seconds.keys() == set(LAYERS) and min(seconds.values()) > 0.1
    assert waits == pytest.approx(seconds, rel=0.01)


@needs_mpi
def test_a_trace_shows_exchanges_between_processes(tmp_path):
    body = "trace, devices, static = sys.argv[1] + f'/{rank}', 1, False\n"
    run_ranks(2, body + PROGRAM, tmp_path)
    for rank in "01":
        names = [task[0] for task in tasks_of(tmp_path / rank)["SyncBatchNorm cpu(0)"]]
        for layer in LAYERS:
            for phase in "forward", "backward":
                title = f"exchange between processes, {phase} of {layer} on cpu(0)"
                assert names.count(title) == 1
