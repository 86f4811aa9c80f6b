#!/usr/bin/env python3
"""Measures the gain of synchronized batch normalization by images per device.

    python scripts/ablation.py --data-root camvid           # everything, two hours
    python scripts/ablation.py --quick                      # digits, under 15 minutes
    python scripts/ablation.py --draw                       # figures of what there is

Trains FastSCNN with unsynchronized and with synchronized layers on 2 and 4 devices with
1, 2 and 4 images each, and on one device with each of these batches, from the same
initial parameters, in the same order, with the same augmentation and a learning rate in
proportion to the batch; FCN-ResNet-50 on two devices with one image each; then tests
the last epoch, with its running statistics, with those recomputed from the training
images, and with those of each batch. It also measures how far several devices are from
one. A data set is a folder as train_segmentation.py takes it, with a split "test";
class names are CamVid's unless others are given.

Every run has a folder in --runs and a JSON in --results. A second start skips runs that
are done and continues those that were killed. On two cores FastSCNN and FCN take an
hour each; --parts makes them one by one.
"""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout not installed

from ablation import plan, results
from ablation.jobs import carry_out, cores, left_over
from segmentation import folder_lock
from segmentation.errors import Parser, UserError, exit_code

PARTS = "fastscnn", "fcn", "agreement"


def arguments():
    parser = Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data-root", type=Path, metavar="DIR", help="folder of a data set; digits")
    add("--class-names", default=plan.CAMVID, metavar="TEXT", help="of this folder")
    add("--ignore-label", type=int, default=11, metavar="N", help="of this folder")
    add("--quick", action="store_true", help="a small grid, to see that all works")
    add("--parts", nargs="+", choices=PARTS, default=PARTS)
    add("--jobs", type=int, default=cores(), metavar="N", help="processes at once")
    add("--results", type=Path, metavar="DIR", help="default: scripts/results/ablation")
    add("--runs", type=Path, metavar="DIR", help="default: runs/ablation[-quick]")
    add("--draw", action="store_true", help="only draw figures and print the table")
    options = parser.parse_args()
    if options.jobs < 1:
        raise UserError(f"--jobs is {options.jobs}, but must be at least 1.")
    runs = Path("runs/ablation-quick" if options.quick else "runs/ablation")
    options.runs = options.runs or runs
    if options.results is None:
        committed = Path(__file__).resolve().parent / "results" / "ablation"
        options.results = options.runs / "results" if options.quick else committed
    return options


def tasks_of(options):
    quick = options.quick
    scales = plan.QUICK if quick else plan.FULL
    fast, fcn = scales["fastscnn"], scales["fcn"]
    data = {"dataset": "digits"}
    if options.data_root:
        data = {"dataset": "folder", "data_root": str(options.data_root)}
        data.update(class_names=options.class_names, ignore_label=options.ignore_label)
    make = plan.Plan(data, options.results, options.runs)
    parts = {
        "fastscnn": make.grid(fast),
        "fcn": make.grid(fcn),
        "agreement": [make.agreement(fast, 8, 1 if quick else 4, (2, 4))],
    }
    return [task for part in options.parts for task in parts[part]]


def ablation():
    options = arguments()
    if not options.draw:
        tasks = tasks_of(options)
        with folder_lock.held(options.runs):
            carry_out(left_over(tasks), options.jobs, options.runs / "logs")
    found = results.load(options.results)
    if not results.runs(found):
        raise UserError(f"The folder {options.results} holds no result of a run.")
    print(results.table(found))
    if results.runs(found, model="fastscnn"):
        print("\n" + results.claim(found, next(iter(found)).split("-")[0]) + "\n")
    from ablation import figures

    for path in figures.draw(found, options.results):
        print(f"written to {path}")


if __name__ == "__main__":
    sys.exit(exit_code(ablation))
