"""Train the digits classifier in several processes, on one or several machines.

    mpirun -n 2 python examples/several_processes.py

Each process trains on its share of every batch. Statistics and gradients are computed
over all processes, so all processes end with the same parameters.
"""

import argparse

import gluon_syncbn  # before mxnet: restores aliases that NumPy has removed
from gluon_syncbn import distributed

import mxnet as mx
from mpi4py import MPI
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

    distributed.init()
    rank, ranks = distributed.rank(), distributed.size()
    context = mx.cpu()  # or mx.gpu(distributed.local_rank())
    net = gluon_syncbn.convert_sync_batchnorm(make_net())
    net.initialize(mx.init.Xavier(), ctx=context)
    net.hybridize(static_alloc=True, static_shape=True)
    settings = {"learning_rate": 3e-3}
    trainer = distributed.Trainer(net, "adam", settings)  # copies rank 0's parameters
    loss = gluon.loss.SoftmaxCrossEntropyLoss()

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8).astype("float32") / 16
    data = gluon.data.ArrayDataset(images, labels)
    data = data.take(len(data) // ranks * ranks)  # shards of equal size
    shard = data.shard(ranks, rank)
    batches = gluon.data.DataLoader(shard, max(1, 50 // ranks), shuffle=True)
    for epoch in range(options.epochs):
        right = 0
        for x, label in batches:
            with autograd.record():
                output = net(x)
                losses = loss(output, label)
            losses.backward()
            trainer.step(len(x))
            right += int((output.argmax(1) == label.astype("float32")).sum().asscalar())
        right = MPI.COMM_WORLD.allreduce(right)
        if rank == 0:
            print(f"epoch {epoch}: training accuracy {right / len(data):.3f}")
    if rank == 0:
        net.save_parameters("digits.params")


if __name__ == "__main__":
    main()
