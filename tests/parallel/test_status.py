"""kill -USR1 prints what a program waits for, and ends nothing."""

import os
import signal
import subprocess
import sys

from support.helpers import ROOTS

PROGRAM = """
import sys, threading
import gluon_syncbn
import mxnet as mx

layer = gluon_syncbn.SyncBatchNorm(in_channels=3, num_devices=2, prefix="norm_")
contexts = [mx.cpu(0), mx.cpu(1)]
layer.initialize(ctx=contexts)
x = [mx.nd.ones((2, 3), ctx=c) for c in contexts]

def call_the_second_device():
    sys.stdin.readline()
    with mx.autograd.train_mode():
        layer(x[1])

for step in range(12):
    with mx.autograd.train_mode():
        y = [layer(each) for each in x]
    mx.nd.waitall()
with mx.autograd.train_mode():
    y = layer(x[0])
threading.Thread(target=call_the_second_device).start()
print("waits", flush=True)
y.wait_to_read()
print("finished", flush=True)
"""


def test_a_signal_prints_who_is_missing_and_the_latest_exchanges():
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": ROOTS, "GLUON_SYNCBN_STATUS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout.readline() == "waits\n"
    program.send_signal(signal.SIGUSR1)
    lines = []
    while "The program stands at" not in "".join(lines):
        lines.append(program.stderr.readline())
        assert lines[-1], lines
    output = "".join(lines)
    assert "pending exchanges: 1\nSyncBatchNorm 'norm', forward: waited" in output
    assert "Missing: cpu(1).\n" in output  # no advice follows
    (history,) = [line for line in lines if line.startswith("norm: ")]
    assert history.count("forward ") == 10
    assert "<string>:24" in lines[-1]
    output, _ = program.communicate("\n", timeout=60)
    assert output == "finished\n" and program.returncode == 0
