#!/usr/bin/env bash
# Sets everything up and trains a segmentation net on two CPU contexts, a few minutes in all.
# Arguments go to scripts/train_segmentation.py.
set -u
cd "$(dirname "$0")/.." || exit 1
. scripts/environment.sh
exec python scripts/train_segmentation.py --ctx cpu --num-devices 2 --overwrite "$@"
