"""A failed step changes nothing: all of it happens, or none of it.

Nets of two kinds fail at random places, in all ways to drive devices; then recover() has
to leave a state of the run without a failure, bit by bit, from which that run goes on.
"""

import collections

import pytest
from support.failed_steps import check_failure

import gluon_syncbn

KINDS = "exception", "absent", "ended", "ended later", "interrupt"
WAYS = "allow_plain_loop", "map", "make_parallel"


@pytest.mark.parametrize("way", WAYS)
def test_a_failed_step_changes_nothing(way, ctrl_c):
    gluon_syncbn.set_timeout(0.3)
    kinds = [kind for kind in KINDS if (kind, way) != ("absent", "make_parallel")]
    outcomes, expected = collections.Counter(), {}
    for seed in range(100):
        outcomes[check_failure(seed, [way], kinds, expected)] += 1
    assert {kind for kind, outcome in outcomes if outcome == "undone"} == set(kinds)
