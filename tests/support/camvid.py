"""Driving scenes for tests: CamVid, where the machine has it.

Used by tests of training. ``GLUON_SYNCBN_CAMVID`` names another folder.
"""

import os
from pathlib import Path

import pytest

from support.helpers import ROOT

FOLDER = Path(os.environ.get("GLUON_SYNCBN_CAMVID", ROOT.parent / "shared/data/camvid"))
needs_camvid = pytest.mark.skipif(
    not (FOLDER / "images/train").is_dir(),
    reason=f"CamVid is not in {FOLDER} (GLUON_SYNCBN_CAMVID)",
)
