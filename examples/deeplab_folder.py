"""Train GluonCV's DeepLabV3 on a folder of pictures and label maps, on two devices.

    python examples/deeplab_folder.py FOLDER --classes 11

The folder has images/NAME.jpg or .png, and labels/NAME.png of the same size. The values
of a label map are class numbers from 0; 255 means unlabelled. To train with
augmentation, checkpoints and figures, see `scripts/train_segmentation.py`.
"""

import argparse
from pathlib import Path

import gluon_syncbn  # before mxnet: restores aliases that NumPy has removed

import mxnet as mx
import numpy as np
from gluoncv.loss import MixSoftmaxCrossEntropyLoss
from gluoncv.model_zoo import DeepLabV3
from mxnet import autograd, gluon
from PIL import Image

MEAN = np.float32([0.485, 0.456, 0.406])
DEVIATION = np.float32([0.229, 0.224, 0.225])


class Folder(gluon.data.Dataset):
    """Pictures (3, size, size) and labels (size, size), where -1 means unlabelled."""

    def __init__(self, root, size):
        self._size = size, size
        self._labels = sorted(Path(root, "labels").glob("*.png"))
        images = {path.stem: path for path in Path(root, "images").iterdir()}
        self._images = [images[path.stem] for path in self._labels]

    def __len__(self):
        return len(self._images)

    def __getitem__(self, index):
        picture = Image.open(self._images[index]).convert("RGB")
        picture = np.asarray(picture.resize(self._size, Image.BILINEAR), np.float32)
        labels = Image.open(self._labels[index]).resize(self._size, Image.NEAREST)
        labels = np.asarray(labels, np.float32)
        picture = (picture / 255 - MEAN) / DEVIATION
        return picture.transpose(2, 0, 1), np.where(labels == 255, -1, labels)


class NetWithLoss(gluon.Block):
    """A loss value for each picture, computed on the device of the net's output."""

    def __init__(self, net, loss):
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, images, labels):
        return self.loss(*self.net(images), labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--classes", type=int, required=True)
    parser.add_argument("--size", type=int, default=240)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--from-scratch", action="store_true", help="load no weights")
    options = parser.parse_args()
    mx.random.seed(0)
    np.random.seed(0)  # the DataLoader shuffles with NumPy

    contexts = [mx.cpu(0), mx.cpu(1)]  # or gpu(0) and gpu(1)
    net = DeepLabV3(
        options.classes,
        backbone="resnet50",
        pretrained_base=not options.from_scratch,
        crop_size=options.size,
    )
    net.initialize(mx.init.Xavier())  # skips what GluonCV has initialized
    net.hybridize(static_alloc=True, static_shape=True)
    # net_with_loss returns losses, so the net's large outputs are not concatenated.
    # The parameters were initialized on cpu(0). reset_ctx moves them to both contexts.
    net_with_loss = NetWithLoss(net, MixSoftmaxCrossEntropyLoss(aux=True))
    gluon_syncbn.make_parallel(net_with_loss, contexts, reset_ctx=True)
    settings = {"learning_rate": 0.01, "momentum": 0.9, "wd": 1e-4}
    trainer = gluon.Trainer(net.collect_params(), "sgd", settings)

    data = Folder(options.folder, options.size)
    batches = gluon.data.DataLoader(data, options.batch_size, shuffle=True)
    for epoch in range(options.epochs):
        total = 0.0
        for images, labels in batches:
            with autograd.record():
                losses = net_with_loss(images, labels)
            losses.backward()
            trainer.step(len(images))
            total += losses.sum().asscalar()
        print(f"epoch {epoch}: loss {total / len(data):.3f}", flush=True)
    net.save_parameters("deeplab.params")  # a plain DeepLabV3 loads this file


if __name__ == "__main__":
    main()
