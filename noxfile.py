"""Run the tests with each supported version of MXNet, Python and NumPy.

    pip install nox==2024.10.9
    nox                               # all, some hours
    nox -s "versions-3.8(1.6.0)"      # one row of docs/guides/mxnet2.md
    nox -s "versions-3.8(1.6.0)" -- tests/layer/test_batch_norm.py    # records nothing

All sessions use this checkout's library. With pyenv, PYENV_VERSION names the Pythons.
A result replaces the former one in scripts/results/mxnet_versions.json. Then
`cog -r -I scripts docs/guides/mxnet2.md` writes the table.
"""

import json
import re
from pathlib import Path

import nox

ROOT = Path(__file__).parent
RESULTS = ROOT / "scripts" / "results" / "mxnet_versions.json"
TESTS = ["tests/layer", "tests/parallel", "tests/statistics"]
MXNETS = ["1.6.0", "1.7.0.post2", "1.8.0.post0", "1.9.0", "1.9.1", "2.0.0b1"]
NUMPYS = {
    **dict.fromkeys(["3.8", "3.9", "3.10", "3.11"], "1.23.5"),
    "3.12": "1.26.4",
    "3.13": "2.2.6",
}


@nox.session(python=list(NUMPYS), venv_backend="venv")
@nox.parametrize("mxnet", MXNETS, ids=MXNETS)
def versions(session, mxnet):
    numpy = f"numpy=={NUMPYS[session.python]}"
    tools = "pytest", "pytest-timeout", "hypothesis==6.113.0"
    session.install(numpy, "requests", "graphviz<0.9", "setuptools<81", *tools)
    session.install("--no-deps", f"mxnet=={mxnet}")  # it pins NumPy below 2
    options = {"silent": True, "success_codes": range(256)}
    options["env"] = {"PYTHONPATH": str(ROOT)}
    command = "python -m pytest -q -p no:cacheprovider -W ignore".split()
    output = session.run(*command, *(session.posargs or TESTS), **options)
    last = output.strip().splitlines()[-1]
    found = re.findall(r"(\d+) (passed|failed|skipped|error)", last)
    counts = {name: int(number) for number, name in found}
    good = "passed" in counts and not {"failed", "error"} & set(counts)
    outcome = "passed" if good else "failed"
    session.log(f"{outcome}: {counts}")
    if not session.posargs:
        row = {
            "mxnet": mxnet,
            "python": session.python,
            "numpy": NUMPYS[session.python],
        }
        record({**row, "outcome": outcome, "counts": counts})
    if outcome == "failed":
        session.error(output[-3000:])


def record(new):
    """Write a row of the results, in place of the former row of these versions."""
    report = json.loads(RESULTS.read_text())
    rows = {(row["mxnet"], row["python"]): row for row in [*report["rows"], new]}
    order = [(mxnet, python) for mxnet in MXNETS for python in NUMPYS]
    report["rows"] = [rows[pair] for pair in order if pair in rows]
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
