"""Train a classifier of digits with one call of the net for each context.

    python examples/own_loop.py

`Devices` splits batches, and `map` calls a function in a thread for each context. Read
results after `map`, because the layer waits until it is called on all contexts.
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    mx.random.seed(0)

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8).astype("float32") / 16
    data = gluon.data.ArrayDataset(images, labels)
    batches = gluon.data.DataLoader(data, 50, shuffle=True, last_batch="discard")

    contexts = [mx.cpu(0), mx.cpu(1)]
    net = gluon_syncbn.convert_sync_batchnorm(make_net(), num_devices=len(contexts))
    net.initialize(mx.init.Xavier(), ctx=contexts)
    net.hybridize(static_alloc=True, static_shape=True)  # the fastest mode on CPUs
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 3e-3})
    loss = gluon.loss.SoftmaxCrossEntropyLoss()

    def forward(x, label):
        output = net(x)
        return output, loss(output, label)

    devices = gluon_syncbn.Devices(contexts)
    for epoch in range(options.epochs):
        accuracy = mx.metric.Accuracy()
        for x, label in batches:
            xs, labels = devices.split(x), devices.split(label)
            with autograd.record():
                results = devices.map(forward, xs, labels)
            outputs, losses = zip(*results)
            devices.map(lambda value: value.backward(), losses)
            trainer.step(len(x))
            accuracy.update(labels, outputs)
        print(f"epoch {epoch}: training accuracy {accuracy.get()[1]:.3f}")
    gluon_syncbn.check_replicas(net)


if __name__ == "__main__":
    main()
