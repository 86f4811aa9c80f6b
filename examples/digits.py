"""Train a classifier of scikit-learn's digits on several devices.

    python examples/digits.py

The last batch of an epoch has 47 rows. make_parallel splits it into uneven shards.
"""

import argparse

import gluon_syncbn  # before mxnet: restores aliases that NumPy has removed

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn
from sklearn.datasets import load_digits


def make_net():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 3), nn.BatchNorm(), nn.Activation("relu"))
    net.add(nn.Conv2D(32, 3), nn.BatchNorm(), nn.Activation("relu"))
    net.add(nn.Dense(10))
    return net


def evaluate(net, batches):
    accuracy = mx.metric.Accuracy()
    for x, label in batches:
        accuracy.update(label, net(x))
    return accuracy.get()[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    mx.random.seed(0)

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8).astype("float32") / 16
    training = gluon.data.ArrayDataset(images[:1347], labels[:1347])
    held_out = gluon.data.ArrayDataset(images[1347:], labels[1347:])
    batches = gluon.data.DataLoader(training, batch_size=50, shuffle=True)
    test_batches = gluon.data.DataLoader(held_out, batch_size=50)

    contexts = gluon_syncbn.available_contexts()  # all GPUs, or a CPU context
    if len(contexts) == 1:  # no GPU, or one
        contexts = [mx.cpu(0), mx.cpu(1)]
    net = gluon_syncbn.make_parallel(make_net(), ctx=contexts)
    net.initialize(mx.init.Xavier())
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 3e-3})
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    for epoch in range(options.epochs):
        for x, label in batches:
            with autograd.record():
                total = loss(net(x), label.as_in_context(contexts[0]))
            total.backward()
            trainer.step(len(x))
        print(f"epoch {epoch}: test accuracy {evaluate(net, test_batches):.3f}")
    gluon_syncbn.check_replicas(net)  # all devices hold the same parameters


if __name__ == "__main__":
    main()
