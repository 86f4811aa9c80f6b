"""Ctrl-C in Devices.map: the first waits for every context, a second does not."""

from support.helpers import output_of

STUCK = """
import os, signal, threading, time
import gluon_syncbn, mxnet as mx

signal.signal(signal.SIGINT, signal.default_int_handler)
gluon_syncbn.set_timeout(1)
left = threading.Event()

def press():
    while not left.wait(0.05):
        os.kill(os.getpid(), signal.SIGINT)

def never_ends():
    while True:
        time.sleep(0.01)

devices = gluon_syncbn.Devices([mx.cpu(0), mx.cpu(1)])
try:
    threading.Thread(target=press).start()
    devices.map(never_ends)
except KeyboardInterrupt:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    left.set()
    print("interrupted")
print(devices.map(int))
"""


def test_a_function_that_never_ends_can_be_left():
    assert output_of(STUCK).splitlines() == ["interrupted", "[0, 0]"]
