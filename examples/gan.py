"""A GAN on two devices: two nets with batch normalization, each made parallel.

    python examples/gan.py

The generator learns through the discriminator: the gradient of the discriminator's
input goes back to the generator, from device to device.
"""

import argparse

import gluon_syncbn  # first, so that MXNet works with today's NumPy

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from sklearn.datasets import load_digits

NOISE = 16  # numbers that the generator makes a picture of


def as_pictures(F, x):
    return x.reshape((0, 32, 4, 4))


def enlarged(F, x):
    return F.UpSampling(x, scale=2, sample_type="nearest")


def make_generator():
    """Noise of shape (N, NOISE) to pictures of (N, 1, 8, 8) in 0 to 1."""
    net = nn.HybridSequential(prefix="generator_")
    with net.name_scope():
        net.add(nn.Dense(32 * 4 * 4), nn.HybridLambda(as_pictures))
        net.add(nn.BatchNorm(), nn.Activation("relu"))
        net.add(nn.HybridLambda(enlarged), nn.Conv2D(16, 3, padding=1))
        net.add(nn.BatchNorm(), nn.Activation("relu"))
        net.add(nn.Conv2D(1, 3, padding=1), nn.Activation("sigmoid"))
    return net


def make_discriminator():
    """Pictures to one number each, greater than 0 for those taken as real."""
    net = nn.HybridSequential(prefix="discriminator_")
    with net.name_scope():
        net.add(nn.Conv2D(32, 4, 2, 1), nn.LeakyReLU(0.2))
        net.add(nn.Conv2D(64, 4, 2, 1), nn.BatchNorm(), nn.LeakyReLU(0.2))
        net.add(nn.Dense(1))
    return net


def on_devices(net, contexts):
    """The net made parallel, and its trainer."""
    net = gluon_syncbn.make_parallel(net, ctx=contexts)
    net.initialize(mx.init.Normal(0.05))
    net.hybridize()
    settings = {"learning_rate": 1e-3, "beta1": 0.5}
    return net, gluon.Trainer(net.collect_params(), "adam", settings)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    mx.random.seed(0)

    images, _ = load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8).astype("float32") / 16
    batches = gluon.data.DataLoader(gluon.data.ArrayDataset(images), 60, shuffle=True)

    contexts = [mx.cpu(0), mx.cpu(1)]
    generator, generator_trainer = on_devices(make_generator(), contexts)
    discriminator, discriminator_trainer = on_devices(make_discriminator(), contexts)
    loss = gluon.loss.SigmoidBinaryCrossEntropyLoss()

    for epoch in range(options.epochs):
        sums = np.zeros(2)
        for real in batches:
            real, rows = real.as_in_context(contexts[0]), len(real)
            ones, zeros = mx.nd.ones((rows, 1)), mx.nd.zeros((rows, 1))
            noise = mx.nd.random.normal(shape=(rows, NOISE))

            with autograd.record():
                fake = generator(noise)
                guesses = discriminator(real), discriminator(fake.detach())
                judged = loss(guesses[0], ones) + loss(guesses[1], zeros)
            judged.backward()
            discriminator_trainer.step(rows)

            with autograd.record():
                fooled = loss(discriminator(generator(noise)), ones)
            fooled.backward()
            generator_trainer.step(rows)
            sums += judged.sum().asscalar(), fooled.sum().asscalar()
        means = sums / len(images)
        print(f"epoch {epoch}: discriminator {means[0]:.3f}, generator {means[1]:.3f}")
    for net in generator, discriminator:
        gluon_syncbn.check_replicas(net)


if __name__ == "__main__":
    main()
