"""The parts that all processes of the ablation share: task, net on devices, result.

Called by one_run.py and agreement.py.
"""

import json
import sys

from benchmarks import benchmarking
from mxnet.gluon import nn
from segmentation.config import Config
from segmentation.data import Batches
from segmentation.devices import open_contexts
from segmentation.engine import Engine
from segmentation.files import write_json
from segmentation.models import build_model

from .results import rounded


def read_task():
    """The options of this process, and the settings among them."""
    task = json.loads(sys.argv[1])
    return task, Config.from_dict(task["settings"])


def write_result(task, **found):
    document = {**task["about"], "settings": task["compared"], **found}
    document["machine"] = benchmarking.machine()
    write_json(task["result"], rounded(document))


def make_engine(config, dataset, training=True, weights=None, change=None):
    """The net of these settings without Dropout, changed, and batches of a data set.

    Dropout draws other numbers on other devices.
    """
    contexts = open_contexts(config.ctx, config.num_devices)
    net = build_model(config, len(dataset.classes), contexts, weights)
    net.apply(_without_dropout)
    if change:
        change(net)
    batches = Batches(dataset, config, training)
    engine = Engine(net, contexts, config, batches.count, len(dataset.classes))
    return engine, batches


def _without_dropout(block):
    if isinstance(block, nn.Dropout):
        block._rate = 0
