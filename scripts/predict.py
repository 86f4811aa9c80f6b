#!/usr/bin/env python3
"""Segment an image with a checkpoint of train_segmentation.py and write the overlay.

    python scripts/predict.py --checkpoint runs/RUN --image FILE --output FILE.png

An image of any size is covered by squares of the net's crop size, whose class scores
are averaged where they overlap.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout not installed

from segmentation.errors import Parser, UserError, exit_code


def arguments():
    parser = Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    text = "checkpoint, or a run folder, whose best.npz is taken"
    add("--checkpoint", required=True, metavar="FILE", help=text)
    add("--image", required=True, metavar="FILE")
    text = "default: NAME_overlay.png where you are"
    add("--output", metavar="FILE.png", help=text)
    add("--ctx", choices=("cpu", "gpu"), default="cpu")
    options = parser.parse_args()
    output = options.output or Path(options.image).stem + "_overlay.png"
    if Path(output).suffix.lower() != ".png":
        raise UserError(f"--output is {output}, but the overlay is a .png file.")
    options.output = Path(output)
    return options


def tile_starts(length, tile):
    """Offsets of squares of side `tile` that cover `length` evenly."""
    count = -(-length // tile)
    return [round(k * (length - tile) / max(1, count - 1)) for k in range(count)]


def class_scores(net, image, crop, context):
    """Mean class probabilities (classes, height, width) of a scaled image."""
    import mxnet as mx
    import numpy as np
    from segmentation.data.augment import normalized

    height, width = image.shape[:2]
    total, times = 0.0, np.zeros((height, width), np.float32)
    for y in tile_starts(height, crop):
        for x in tile_starts(width, crop):
            window = np.s_[y : y + crop, x : x + crop]
            tile = mx.nd.array(normalized(image[window])[None], ctx=context)
            scores = net(tile)[0].softmax(axis=1).asnumpy()[0]
            if not times.any():
                total = np.zeros((len(scores), height, width), np.float32)
            total[(slice(None), *window)] += scores
            times[window] += 1
    return total / times


def segment(net, image, crop, context):
    """The class map of an image, at the image's own size."""
    import numpy as np
    from PIL import Image
    from segmentation.data.augment import scaled_to

    height, width = image.shape[:2]
    blank = np.zeros((height, width), np.int32)
    scaled, _ = scaled_to(image, blank, crop)
    prediction = class_scores(net, scaled, crop, context).argmax(axis=0)
    picture = Image.fromarray(prediction.astype(np.int32))
    return np.asarray(picture.resize((width, height), Image.NEAREST))


def predict():
    options = arguments()

    from segmentation import checkpoint, report
    from segmentation.data import read_image
    from segmentation.devices import open_contexts
    from segmentation.models import build_model

    state = checkpoint.load(checkpoint.path_of(options.checkpoint, "best.npz"))
    image = read_image(options.image)
    contexts = open_contexts(options.ctx, 1)
    config = replace(state.config, norm="bn", num_devices=1, pretrained=False)
    net = build_model(config, len(state.classes), contexts, state.parameters)
    prediction = segment(net, image, config.crop_size, contexts[0])
    name = Path(options.image).name[-40:]
    heading = f"{config.model}, epoch {state.epoch}: {name}"
    report.save_overlay(options.output, image, prediction, state.classes, heading)
    for index, name in enumerate(state.classes):
        share = (prediction == index).mean()
        if share:
            print(f"{name:20s} {share:6.1%}")
    print(f"overlay: {options.output}")


if __name__ == "__main__":
    sys.exit(exit_code(predict))
