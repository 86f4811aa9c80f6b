"""Random programs agree with the oracle: 100 that are always the same.

hypothesis reduces a program that fails, and prints it. GLUON_SYNCBN_PROGRAMS=10000 runs
so many, and other ones each time.
"""

import os

import gluon_syncbn

import pytest
from hypothesis import HealthCheck, given, settings
from support import program_runner
from support.program_strategy import programs

MORE = os.environ.get("GLUON_SYNCBN_PROGRAMS")


@pytest.mark.timeout(int(MORE or 0) + 300)
@settings(
    max_examples=int(MORE or 100),
    derandomize=not MORE,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(programs())
def test_equals_the_oracle(program):
    try:
        program_runner.run(program)
    except Exception:
        gluon_syncbn.recover()  # for the next one
        raise
