"""Fixtures of all tests: devices, and timeouts that end a hang within seconds."""

import os

import gluon_syncbn
from gluon_syncbn.native import failures

import pytest
from support.helpers import cpus


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run all tests, repeat some")


def pytest_configure(config):
    repetitions = "10" if config.getoption("full") else "1"
    os.environ.setdefault("GLUON_SYNCBN_REPEAT", repetitions)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skip rather than deselect: pytest-xdist does not count deselected tests."""
    if item.get_closest_marker("full") and not item.config.getoption("full"):
        pytest.skip("bash scripts/test.sh --full runs it")


def pytest_collection_modifyitems(items):
    """Start the longest test first, so that no worker waits for it at the end."""
    items.sort(key=lambda item: item.path.name != "test_native.py")


@pytest.fixture(autouse=True)
def short_timeout():
    """Limit waits of layers to 20 s, and recover if a layer failed in the test."""
    previous = gluon_syncbn.get_timeout()
    gluon_syncbn.set_timeout(20)
    yield
    if failures.failure():
        gluon_syncbn.recover()
    gluon_syncbn.set_timeout(previous)


@pytest.fixture
def make_devices():
    return lambda count, first=0: gluon_syncbn.Devices(cpus(count, first))


@pytest.fixture
def devices(make_devices):
    return make_devices(2)
