#!/usr/bin/env python3
"""Segment an image with a net of train_segmentation.py and write the overlay.

    python scripts/predict.py --checkpoint runs/RUN --image FILE --output FILE.png

An image of any size is covered by squares of the net's crop size, whose class scores
are added up where they overlap.
"""

import sys
from dataclasses import replace
from pathlib import Path

import mxnet as mx
import numpy as np
from PIL import Image

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout not installed

from segmentation import pictures, run_folder
from segmentation.data import read_image
from segmentation.data.augment import normalized, scaled_to
from segmentation.errors import Parser, UserError, exit_code
from segmentation.models import build_model


def arguments():
    parser = Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--checkpoint", required=True, type=Path, help="run; its best epoch is taken")
    add("--image", required=True, type=Path)
    add("--output", type=Path, help="default: NAME_overlay.png where you are")
    options = parser.parse_args()
    options.output = options.output or Path(options.image.stem + "_overlay.png")
    if options.output.suffix.lower() != ".png":
        raise UserError(
            f"--output is {options.output}, but the overlay is a .png file."
        )
    return options


def tile_starts(length, tile):
    """Offsets of squares of side `tile` that cover `length` evenly."""
    count = -(-length // tile)
    return [round(k * (length - tile) / max(1, count - 1)) for k in range(count)]


def segment(net, num_classes, image, crop):
    """The class map of an image, at the image's own size."""
    height, width = image.shape[:2]
    scaled, _ = scaled_to(image, np.zeros((height, width), np.int32), crop)
    pixels = normalized(scaled)
    scores = np.zeros((num_classes, *pixels.shape[1:]), np.float32)
    for y in tile_starts(pixels.shape[1], crop):
        for x in tile_starts(pixels.shape[2], crop):
            window = np.s_[:, y : y + crop, x : x + crop]
            tile = mx.nd.array(pixels[window][None])
            scores[window] += net(tile)[0].softmax(axis=1).asnumpy()[0]
    picture = Image.fromarray(scores.argmax(axis=0).astype(np.int32))
    return np.asarray(picture.resize((width, height), Image.NEAREST))


def main():
    options = arguments()
    config, classes, log = run_folder.load(options.checkpoint)
    epoch = run_folder.best_epoch(log)
    image = read_image(options.image)
    net = build_model(replace(config, pretrained=False), len(classes), [mx.cpu()])
    run_folder.restore(net, options.checkpoint, epoch)
    prediction = segment(net, len(classes), image, config.crop_size)
    heading = f"{config.model}, epoch {epoch}: {options.image.name[-40:]}"
    pictures.save_overlay(options.output, image, prediction, classes, heading)
    for index in np.unique(prediction):
        print(f"{classes[index]:20s} {(prediction == index).mean():6.1%}")
    print(f"overlay: {options.output}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
