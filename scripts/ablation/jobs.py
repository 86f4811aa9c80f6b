"""Carries out tasks as processes, several at once, and can be killed.

Called by ablation.py. A task that has its result is skipped, so a second start
continues the first; a run that was killed continues from its checkpoint. It must not
know what tasks compute.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from segmentation.errors import UserError

from .results import SCORES

SCRIPTS = Path(__file__).resolve().parents[1]


def left_over(tasks):
    """The tasks without a result; a result of other settings is an error.

    A result of an earlier version, which lacks a score, is made again.
    """
    todo = []
    for task in tasks:
        path = Path(task["result"])
        found = json.loads(path.read_text()) if path.exists() else None
        if found is None or not found.get("test", SCORES).keys() >= SCORES.keys():
            todo.append(task)
        if found is not None and found["settings"] != task["compared"]:
            raise UserError(
                f"{path} is the result of other settings: give another --results, or "
                "remove it."
            )
    return todo


def carry_out(tasks, count, logs):
    """Runs `count` tasks at once."""
    logs.mkdir(parents=True, exist_ok=True)
    print(f"{len(tasks)} to do", flush=True)
    waiting, running, failed = list(tasks), [], []
    try:
        while waiting or running:
            while waiting and len(running) < count:
                task = waiting.pop(0)
                running.append((task, _start(task, logs)))
            time.sleep(0.1)
            for task, process in list(running):
                if process.poll() is None:
                    continue
                running.remove((task, process))
                words = "done"
                if process.returncode:
                    words = f"FAILED, see {_log_of(task, logs)}"
                    failed.append(task)
                print(f"{task['name']}: {words}", flush=True)
    except KeyboardInterrupt:
        for _, process in running:
            process.send_signal(signal.SIGINT)
        for _, process in running:
            process.wait()
        raise
    if failed:
        raise UserError(f"{len(failed)} of {len(tasks)} failed.")


def _start(task, logs):
    """A task's process; what it prints goes to a file."""
    Path(task["result"]).parent.mkdir(parents=True, exist_ok=True)
    path = [str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path),
    }
    with open(_log_of(task, logs), "a", encoding="utf-8") as output:
        return subprocess.Popen(
            [sys.executable, "-m", f"ablation.{task['module']}", json.dumps(task)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches it once, from this process
        )


def _log_of(task, logs):
    return logs / f"{task['name']}.txt"


def cores():
    return len(os.sched_getaffinity(0))
