#!/usr/bin/env bash
# Install everything, and train a net with nn.BatchNorm and with SyncBatchNorm on two CPU contexts.
# Arguments go to both trainings (scripts/train_segmentation.py).
set -u
cd "$(dirname "$0")/.." || exit 1
cat <<'END'
This demo trains FastSCNN to find handwritten digits in 300 pictures, for 4 epochs on two CPU
contexts (devices) with one picture each: first with nn.BatchNorm, then with SyncBatchNorm.
On two cores each training takes one to two minutes. First .venv is set up, if it is missing.
END
. scripts/environment.sh
train() {
    echo
    python scripts/train_segmentation.py --ctx cpu --num-devices 2 --batch-size 2 --images 300 \
        --crop-size 64 --epochs 4 --lr 0.04 --overwrite --norm "$@" || exit
}
train bn --run-dir runs/demo-bn "$@"
train syncbn --run-dir runs/demo-syncbn --beside runs/demo-bn "$@"
echo
echo "Your own pictures: docs/guides/gluoncv.md. Your own net: README.md, Quick start."
