#!/usr/bin/env bash
# try.sh FOLDER PYTHON: installs the wheel in FOLDER as a user would, into a new environment, and
# runs FOLDER/tests with no compiler on PATH. With DEMO=1 it also trains the demonstration's net.
# Run by wheels.sh, in the older root and outside of it.
set -euo pipefail
cd "$1"
wheel=$(echo "$PWD"/*.whl)
extras=mpi${DEMO:+,scripts}

rm -rf venv
"$2" -m venv venv
grep -E '^(numpy|requests|graphviz|setuptools|mpich|mpi4py|hypothesis|pytest|pytest-timeout)==' requirements.txt >pins.txt
venv/bin/pip install --quiet --only-binary :all: -r pins.txt "$wheel[$extras]"
venv/bin/pip install --quiet --only-binary :all: --no-deps mxnet==1.9.1
site=$(cd venv/lib/python*/site-packages && pwd)

export PATH=$PWD/venv/bin
python -m gluon_syncbn
GLUON_SYNCBN_LIBRARY=$site/gluon_syncbn/libgluon_syncbn.so \
    python -m pytest -q --timeout 300 --disable-warnings -p no:cacheprovider \
    tests/layer/test_batch_norm.py tests/parallel/test_random_programs.py
mpirun -n 2 python -c "
import gluon_syncbn
import mxnet as mx
from gluon_syncbn import distributed
distributed.init(60)
layer = gluon_syncbn.SyncBatchNorm(in_channels=1, momentum=0)
layer.initialize()
with mx.autograd.train_mode():
    layer(mx.nd.full((1, 1), distributed.rank() * 2)).wait_to_read()
assert layer.running_mean.data().asscalar() == 1
print('rank', distributed.rank(), 'exchanges')"
if [ -n "${DEMO:-}" ]; then
    python scripts/train_segmentation.py --ctx cpu --num-devices 2 --overwrite
fi
