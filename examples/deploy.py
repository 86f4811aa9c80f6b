"""Train on two devices, and write files that run without this package.

    python examples/deploy.py FOLDER

The program writes digits.params, which a net with nn.BatchNorm loads, and
digits-symbol.json with digits-0000.params, which mxnet.gluon.SymbolBlock imports.
"""

import argparse
from pathlib import Path

import gluon_syncbn  # before mxnet: restores aliases that NumPy has removed

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn
from sklearn.datasets import load_digits


def make_net():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 3), nn.BatchNorm(), nn.Activation("relu"))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(10))
    return net


def train(net, batches):
    """Train for one epoch on two contexts."""
    contexts = [mx.cpu(0), mx.cpu(1)]
    gluon_syncbn.make_parallel(net, contexts)
    net.initialize(mx.init.Xavier())
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 3e-3})
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    for x, label in batches:
        with autograd.record():
            losses = loss(net(x), label)
        losses.backward()
        trainer.step(len(x))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8).astype("float32") / 16
    data = gluon.data.ArrayDataset(images, labels)
    net = make_net()
    train(net, gluon.data.DataLoader(data, 50, shuffle=True))
    x = mx.nd.array(images[:10])
    expected = net(x)

    # The file has one set of parameters, with the names of the net with nn.BatchNorm.
    net.save_parameters(str(folder / "digits.params"))
    plain = make_net()
    plain.load_parameters(str(folder / "digits.params"))
    print(f"loaded: differs by {abs(plain(x) - expected).max().asscalar():.1e}")

    # Convert back to nn.BatchNorm and export.
    gluon_syncbn.revert_sync_batchnorm(net)
    net.hybridize()
    net(x)
    net.export(str(folder / "digits"))
    imported = gluon.SymbolBlock.imports(
        str(folder / "digits-symbol.json"), ["data"], str(folder / "digits-0000.params")
    )
    print(f"imported: differs by {abs(imported(x) - expected).max().asscalar():.1e}")


if __name__ == "__main__":
    main()
