"""Runs the tests with each MXNet and each Python that the package is for.

    python scripts/check_versions.py                 # all, some two hours
    python scripts/check_versions.py --mxnet 1.6.0 --python 3.8 3.11

Every pair gets an environment of its own in a temporary folder, and this checkout's
library, which is the same for all. With pyenv, PYENV_VERSION names the Pythons. Writes
scripts/results/mxnet_versions.json, where rows of other pairs stay, and the table of
docs/versions.md.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "scripts" / "results" / "mxnet_versions.json"
PAGE = ROOT / "docs" / "versions.md"
MXNETS = ["1.6.0", "1.7.0.post2", "1.8.0.post0", "1.9.0", "1.9.1", "2.0.0b1"]
PYTHONS = ["3.8", "3.9", "3.10", "3.11"]
NUMPY = "1.23.5"  # the last series that all of these work with
TESTS = ["tests/layer", "tests/parallel", "tests/statistics"]


def run(*command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        list(map(str, command)), cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def check(mxnet, python):
    """Tests one pair; returns its row of the JSON."""
    row = {"mxnet": mxnet, "python": python}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([f"python{python}", "-m", "venv", folder], check=True)
        own = Path(folder) / "bin" / "python"
        packages = [f"mxnet=={mxnet}", f"numpy=={NUMPY}", "pytest", "pytest-timeout"]
        installed = run(own, "-m", "pip", "install", "--quiet", *packages)
        if installed.returncode != 0:
            return {**row, "outcome": "not installed"}
        imported = run(own, "-c", "import gluon_syncbn")
        if imported.returncode != 0:
            says = imported.stdout.strip().splitlines()[-1]
            refused = "gluon_syncbn works with" in says
            return {**row, "outcome": "refused" if refused else "broken", "says": says}
        options = ["-q", "-p", "no:cacheprovider", "-W", "ignore"]
        tested = run(own, "-m", "pytest", *options, *TESTS)
    print(tested.stdout[-3000:] if tested.returncode else "", end="")
    last = tested.stdout.strip().splitlines()[-1]
    counts = {
        what: int(number)
        for number, what in re.findall(r"(\d+) (passed|failed|skipped|error)", last)
    }
    outcome = "failed" if tested.returncode else "passed"
    return {**row, "outcome": outcome, "counts": counts}


def cell(row):
    if row is None:
        return ""
    if row.get("counts"):  # none where a test ended the whole process
        return ", ".join(f"{n} {what}" for what, n in row["counts"].items())
    return row["outcome"]


def table(rows):
    """The rows as a table of Markdown: MXNet downwards, Python to the right."""
    found = {(row["mxnet"], row["python"]): row for row in rows}
    lines = [
        "| MXNet | " + " | ".join(f"Python {python}" for python in PYTHONS) + " |",
        "|---" * (len(PYTHONS) + 1) + "|",
    ]
    for mxnet in MXNETS:
        cells = [cell(found.get((mxnet, python))) for python in PYTHONS]
        lines.append(f"| {mxnet} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(rows):
    machine = f"{platform.system()} {platform.machine()}"
    report = {"machine": machine, "numpy": NUMPY, "tests": TESTS, "rows": rows}
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    before, _, after = re.split(r"(\n\|.*\|\n)(?!\|)", PAGE.read_text(), flags=re.S)
    PAGE.write_text(f"{before}\n{table(rows)}\n{after}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--mxnet", nargs="+", choices=MXNETS, default=MXNETS)
    parser.add_argument("--python", nargs="+", choices=PYTHONS, default=PYTHONS)
    chosen = parser.parse_args()
    pairs = [(mxnet, python) for mxnet in chosen.mxnet for python in chosen.python]
    missing = {p for _, p in pairs if not shutil.which(f"python{p}")}
    if missing:
        sys.exit(f"python{sorted(missing)[0]} is not on PATH")
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    for mxnet, python in pairs:
        row = check(mxnet, python)
        print(f"mxnet {mxnet}, Python {python}: {cell(row)}", flush=True)
        rows = [r for r in rows if (r["mxnet"], r["python"]) != (mxnet, python)] + [row]
        rows.sort(key=lambda r: (MXNETS.index(r["mxnet"]), PYTHONS.index(r["python"])))
        write(rows)
    sys.exit(any(row["outcome"] in ("failed", "broken") for row in rows))


if __name__ == "__main__":
    main()
