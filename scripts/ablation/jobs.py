"""Carries out the tasks of a plan as processes, several at once, and can be killed.

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
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from segmentation.errors import UserError

SCRIPTS = Path(__file__).resolve().parents[1]


def left_over(tasks):
    """The tasks without a result; a result of other settings is an error."""
    todo = [task for task in tasks if not task.result.exists()]
    for task in tasks:
        if task in todo:
            continue
        settings = json.loads(task.result.read_text())["settings"]
        if settings != task.options["compared"]:
            raise UserError(
                f"{task.result} is the result of other settings: give another "
                "--results, or remove it."
            )
    return todo


class Jobs:
    """Starts processes, tells how long the rest will take, ends them on Ctrl-C."""

    def __init__(self, tasks, count, logs):
        self.todo, self.count, self.logs = tasks, count, logs
        self.running, self.failed, self.done = {}, [], []
        self.stopping = False

    def run(self):
        """Carry out all tasks; those that must be alone come first."""
        self.started = time.monotonic()
        self.logs.mkdir(parents=True, exist_ok=True)
        print(f"{len(self.todo)} to do, {self.estimate()}", flush=True)
        for count, tasks in (
            (1, [task for task in self.todo if task.alone]),
            (self.count, [task for task in self.todo if not task.alone]),
        ):
            with ThreadPoolExecutor(count) as pool:
                futures = [pool.submit(self.carry_out, task) for task in tasks]
                try:
                    for future in as_completed(futures):
                        future.result()
                except KeyboardInterrupt:
                    self.stop()
                    raise
        if self.failed:
            raise UserError(
                f"{len(self.failed)} of {len(self.todo)} failed; the first says: "
                + self.failed[0]
            )

    def carry_out(self, task):
        """Run a task's process to its end, with what it prints in a file."""
        if self.stopping:
            return
        log, started = self.logs / f"{task.name}.txt", time.monotonic()
        task.result.parent.mkdir(parents=True, exist_ok=True)
        threads = max(1, cores() // 2) if task.alone else 1
        path = os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent)])
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join([path, os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, "-m", f"ablation.{task.module}"]
        with open(log, "a", encoding="utf-8") as output:
            process = subprocess.Popen(
                [*command, json.dumps(task.options)], env=environment,
                stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,  # this process sends Ctrl-C, once
            )  # fmt: skip
            self.running[task.name] = process
            status = process.wait()
        del self.running[task.name]
        if self.stopping:
            return
        if status or not task.result.exists():
            words = log.read_text(encoding="utf-8").strip().splitlines() or ["nothing"]
            self.failed.append(f"{task.name}: {words[-1].replace('error: ', '')}")
            print(f"FAILED {self.failed[-1]}", flush=True)
            return
        self.done.append(task)
        print(
            f"{len(self.done)} of {len(self.todo)}: {task.name}, "
            f"{in_words(time.monotonic() - started)}; {self.estimate()}",
            flush=True,
        )

    def estimate(self):
        """The time that is left, in words."""
        finished = sum(task.seconds for task in self.done)
        left = sum(task.seconds for task in self.todo if task not in self.done)
        elapsed = time.monotonic() - self.started
        return f"about {in_words(time_left(finished, left, elapsed, self.count))} left"

    def stop(self):
        self.stopping = True
        for process in list(self.running.values()):
            process.send_signal(signal.SIGINT)


def time_left(finished, left, elapsed, jobs):
    """Seconds for the work that is left, at the speed seen so far.

    Parameters
    ----------
    finished, left : float
        Expected seconds of one core, of what is done and of what is not.
    elapsed : float
        Seconds in which the former was done.
    jobs : int
        Processes at once; until something is done, each is expected to have a core.
    """
    speed = finished / elapsed if finished and elapsed else jobs
    return left / speed


def in_words(seconds):
    minutes = round(seconds / 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min" if minutes else f"{seconds:.0f} s"


def cores():
    return len(os.sched_getaffinity(0))
