#!/usr/bin/env bash
# Install everything and train a segmentation net on two CPU contexts in a few minutes.
# Arguments go to scripts/train_segmentation.py.
set -u
cd "$(dirname "$0")/.." || exit 1
. scripts/environment.sh
exec python scripts/train_segmentation.py --ctx cpu --num-devices 2 --overwrite "$@"
