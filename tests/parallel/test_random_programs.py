"""Random programs agree with the oracle, and mistakes in them would be seen.

`python tests/random_programs.py --seeds 0:10000` is a longer run.
"""

import copy

import pytest
import random_programs
from mxnet import autograd
from support import program_runner
from support.helpers import run_python
from support.program import Layer, Program, Step


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(80))
def test_equals_the_oracle(seed):
    program = random_programs.generate(seed)
    print(program.to_text())
    program_runner.run(program)


def test_a_failing_program_is_printed(capfd):
    def fail(program):
        raise AssertionError("a wrong number")

    program = random_programs.generate(3)
    assert not random_programs.run_one(program, fail)
    text, error = capfd.readouterr().err.strip().split("\n", 1)
    assert Program.from_text(text) == program
    assert "a wrong number" in error
    assert random_programs.run_one(program, lambda program: None)


HANGING = """
import random_programs, time
random_programs.run_one(random_programs.generate(0), lambda _: time.sleep(60), limit=1)
"""


def test_a_hang_ends_with_the_stacks_of_all_threads():
    result = run_python(HANGING)
    assert result.returncode == 1
    assert "Timeout" in result.stderr and "in run_one" in result.stderr


# ---- mistakes that a comparison has to see -------------------------------------------


def make_program(*kinds, x_request="write"):
    """Two layers, one behind the other, on two contexts."""
    layer = Layer(
        momentum=0.5,
        epsilon=1e-3,
        scale=True,
        center=True,
        use_global_stats=False,
        unbiased=False,
        activation="leaky_relu",
        slope=0.25,
        gamma_request="write",
        beta_request="write",
        gammas="normal",
    )
    return Program(
        seed=0,
        way="devices",
        groups=[[0, 1]],
        mode="imperative",
        made="layer",
        chains=[[0, 1]],
        bare=False,
        convolutions=False,
        dtype="float64",
        shape=[0, 3, 4],
        batch_axis=0,
        axis=1,
        data="normal",
        x_request=x_request,
        trainer=False,
        layers=[layer, copy.copy(layer)],
        steps=[Step(kind, [2, 3]) for kind in kinds],
    )


def wrong(words, *kinds, of_layer=(), **of_program):
    """A program's net is made with other values; the comparison has to see it."""
    program = make_program(*kinds)
    made = copy.deepcopy(program)
    vars(made).update(of_program)
    vars(made.layers[0]).update(of_layer)
    with pytest.raises(AssertionError, match=words):
        program_runner.run(program, made)


@pytest.mark.parametrize(
    "words, mistake",
    [
        ("output 0", {"groups": [[0], [1]]}),
        ("output 0", {"chains": [[1, 0]]}),
        ("output 0", {"chains": [[1]]}),
        ("output 0", {"of_layer": {"epsilon": 1.01e-3}}),
        ("output 0", {"of_layer": {"slope": 0.2501}}),
        ("running_mean of layer 0", {"of_layer": {"momentum": 0.501}}),
        ("running_var of layer 0", {"of_layer": {"unbiased": True}}),
        ("dgamma of layer 0", {"of_layer": {"gamma_request": "add"}}),
        ("dbeta of layer 0", {"of_layer": {"beta_request": "add"}}),
    ],
)
def test_sees_another_layer(words, mistake):
    wrong(words, "train", "train", **mistake)


def test_sees_that_a_failure_is_missing(monkeypatch):
    wrong("missing raised nothing", "missing", groups=[[0], [1]])
    monkeypatch.setattr(autograd, "backward", lambda *heads, **options: None)
    wrong("missing_backward raised nothing", "missing_backward")


@pytest.mark.parametrize(
    "x_request, words", [("write", "input gradient"), ("null", "dgamma of layer 0")]
)
def test_sees_other_gradients(x_request, words, monkeypatch):
    def backward(heads, dys, *rest, **options):
        original(heads, [1.00001 * dy for dy in dys], *rest, **options)

    original = autograd.backward
    monkeypatch.setattr(autograd, "backward", backward)
    with pytest.raises(AssertionError, match=words):
        program_runner.run(make_program("train", x_request=x_request))
