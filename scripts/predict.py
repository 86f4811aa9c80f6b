#!/usr/bin/env python3
"""Segment an image with a net that train_segmentation.py has trained.

python scripts/predict.py --checkpoint runs/RUN --image FILE --output FILE.png
"""

import argparse
import itertools
import sys
from pathlib import Path

import gluon_syncbn  # noqa: F401, restores names that mxnet needs in NumPy

import mxnet as mx
import numpy as np
from PIL import Image
from segmentation import model
from segmentation.data import UserError, assemble, painted, read, save_picture


def segment(net, image, crop):
    """Return the class map of an image, in the size of the image."""
    size = image.shape[1::-1]
    scaled = [max(crop, round(side * crop / min(size))) for side in size]
    pixels = np.asarray(Image.fromarray(image).resize(scaled, Image.BILINEAR))
    classes = np.zeros(pixels.shape[:2], np.int32)
    starts = [
        np.linspace(0, n - crop, -(-n // crop)).astype(int) for n in classes.shape
    ]
    for y, x in itertools.product(*starts):
        window = np.s_[y : y + crop, x : x + crop]
        tile, _ = assemble([(pixels[window], classes[window])])
        classes[window] = net(mx.nd.array(tile))[0].argmax(axis=1).asnumpy()[0]
    return np.asarray(Image.fromarray(classes).resize(size, Image.NEAREST))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", required=True, type=Path, help="a run folder")
    parser.add_argument("--image", required=True, type=Path)
    parser.add_argument("--output", default="overlay.png", help="picture to write")
    arguments = parser.parse_args()
    if not arguments.output.lower().endswith(".png"):
        raise UserError(f"--output must end in .png, got {arguments.output}.")
    run_options, classes, _ = model.load(arguments.checkpoint)
    run, image = model.Parser().settings(run_options), read(arguments.image)
    net = model.build_model(run, len(classes), [mx.cpu()])
    model.restore(net, arguments.checkpoint)
    prediction = segment(net, image, run.crop_size)
    overlay = (image * 0.35 + painted(prediction, len(classes)) * 0.65).astype(np.uint8)
    shown, title = np.unique(prediction), f"{run.model}: {arguments.image.name}"
    save_picture(arguments.output, [[image, overlay]], shown, classes, title)
    print(f"overlay: {arguments.output}")


if __name__ == "__main__":
    sys.exit(model.exit_code(main))
