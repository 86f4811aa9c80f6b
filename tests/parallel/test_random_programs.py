"""Random programs agree with the oracle.

`python tests/random_programs.py --seeds 0:10000` is a longer run.
"""

import pytest
import random_programs
from support import program_runner


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(100))
def test_equals_the_oracle(seed):
    program = random_programs.generate(seed)
    print(program)
    program_runner.run(program)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_many_equal_the_oracle():
    assert random_programs.run_seeds(range(100, 2000)) == []
