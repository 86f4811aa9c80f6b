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


class Raised(Exception):
    """What a signal's handler raises."""


class SignalAt:
    """Sends a signal before an operation of Python, counted in ours and some others."""

    FOLDER = os.path.dirname(gluon_syncbn.__file__)
    FILES = contextlib.__file__, gluon.trainer.__file__

    def __init__(self, place, number):
        self.left, self._number = place, number

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, *exception):
        sys.settrace(None)

    def _call(self, frame, _event, _argument):
        path = frame.f_code.co_filename
        if path not in self.FILES and not path.startswith(self.FOLDER):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._operate

    def _operate(self, _frame, event, _argument):
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(self._number)
        return self._operate


@pytest.mark.timeout(120 + REPEAT)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
def test_a_handler_raises_at_any_instant_of_a_step(number, devices):
    """Of a batch with fewer rows than contexts. GLUON_SYNCBN_REPEAT=10 for thousands."""

    def handle(*_):
        raise Raised

    def step():
        with autograd.record():
            loss = net(nd.array([[1, 2]])) ** 2
        loss.backward()
        trainer.step(1)

    def weights():
        arrays = [a for p in (net[0].weight, net[2].weight) for a in p.list_data()]
        return np.concatenate([array.asnumpy().ravel() for array in arrays])

    net = nn.HybridSequential()
    net.add(nn.Dense(2, in_units=2), nn.Dense(2), nn.Dense(1, use_bias=False))
    net.add(SyncBatchNorm(), SyncBatchNorm())
    net = gluon_syncbn.make_parallel(net, devices.contexts)
    net.initialize()
