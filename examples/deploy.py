"""From training on several devices to files that run without this package.

    python examples/deploy.py FOLDER

Writes digits.params, which the net of nn.BatchNorm loads, and digits-symbol.json with
digits-0000.params, which mxnet.gluon.SymbolBlock imports.
"""

import argparse
from pathlib import Path

import gluon_syncbn  # before mxnet

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
    """One epoch on two contexts."""
    contexts = [mx.cpu(0), mx.cpu(1)]
    parallel = gluon_syncbn.make_parallel(net, contexts)  # changes the layers of `net`
    parallel.initialize(mx.init.Xavier())
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 3e-3})
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    for x, label in batches:
        with autograd.record():
            total = loss(parallel(x), label)
        total.backward()
        trainer.step(len(x))
    return parallel


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8).astype("float32") / 16
    data = gluon.data.ArrayDataset(images, labels)
    net = make_net()
    parallel = train(net, gluon.data.DataLoader(data, 50, shuffle=True))
    x = mx.nd.array(images[:10])
    expected = parallel(x)

    # One set of parameters, under the names that they have in the net of BatchNorm.
    parallel.save_parameters(str(folder / "digits.params"))
    plain = make_net()
    plain.load_parameters(str(folder / "digits.params"))
    print(f"loaded: differs by {abs(plain(x) - expected).max().asscalar():.1e}")

    # Back to nn.BatchNorm; then the net exports as any other.
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
