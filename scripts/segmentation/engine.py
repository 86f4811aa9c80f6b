"""One training step, an epoch of them, and an evaluation, on all devices.

Contexts are driven through `Devices.map` only; a plain loop over CPU contexts would
deadlock inside MXNet. Arrays are read (`asnumpy`) outside of it.
"""

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from . import interrupts
from .metrics import Confusion
from .models import output_weights


def poly_lr(base, step, total, warmup):
    """base (1 - step/total)^0.9, times a linear ramp over the first `warmup` steps."""
    ramp = min(1.0, (step + 1) / warmup) if warmup > 0 else 1.0
    return base * (1 - step / total) ** 0.9 * ramp


class SegmentationLoss(gluon.HybridBlock):
    """Sum over labelled pixels of the cross entropy of each output, weighted and added.

    It is a sum and not a mean: divided by the labelled pixels of the *whole* batch,
    shards of any size add up to the whole batch's mean.
    """

    def __init__(self, weights, size):
        super().__init__()
        self._weights, self._size = weights, size

    def hybrid_forward(self, F, label, *outputs):
        labelled = label >= 0
        target = F.maximum(label, 0)
        losses = []
        for weight, output in zip(self._weights, outputs):
            if not weight:
                continue
            if output.shape[2:] != label.shape[1:]:  # ICNet's coarse outputs
                output = F.contrib.BilinearResize2D(
                    output, height=self._size, width=self._size
                )
            # Classes last: over an inner axis, log_softmax is twice as slow on CPUs.
            output = F.transpose(output, (0, 2, 3, 1))
            log_p = F.pick(F.log_softmax(output, axis=-1), target, axis=-1)
            losses.append(-weight * F.sum(log_p * labelled))
        return F.add_n(*losses)


class Engine:
    """A net on its devices with optimizer and learning rate schedule."""

    def __init__(self, net, devices, config, steps_per_epoch, num_classes):
        self.net, self.devices, self.config = net, devices, config
        self.num_classes = num_classes
        self.total = steps_per_epoch * config.epochs
        self.warmup = config.warmup_epochs * steps_per_epoch
        self.loss = SegmentationLoss(output_weights(config), config.crop_size)
        self.main_loss = SegmentationLoss((1.0,), config.crop_size)
        options = {"momentum": config.momentum, "wd": config.weight_decay}
        self.trainer = gluon.Trainer(
            net.collect_params(),
            "sgd",
            {"learning_rate": config.lr, **options},
            update_on_kvstore=False,
        )
        # Makes the trainer copy device 0's parameters to the others now. Left to the
        # first step, that copy would race with running statistics: see `settle`.
        self.trainer.allreduce_grads()

    def seed_epoch(self, epoch):
        """Seed MXNet (dropout) by epoch; each thread has generators of its own."""
        seed = int(np.random.default_rng([self.config.seed, epoch]).integers(2**31))
        ranks = range(len(self.devices.contexts))
        self.devices.map(lambda rank: mx.random.seed(seed + rank), ranks)

    def step(self, x, y, step):
        """Train on one batch; return its loss, the mean over its labelled pixels."""
        rate = poly_lr(self.config.lr, step, self.total, self.warmup)
        self.trainer.set_learning_rate(rate)
        share = 1.0 / max(1, int((y >= 0).sum()))
        xs, ys = self.devices.split(x), self.devices.split(y)

        def forward(x_part, y_part):
            return self.loss(y_part, *self.net(x_part)) * share

        with autograd.record():
            losses = self.devices.map(forward, xs, ys)
        self.devices.map(lambda loss: loss.backward(), losses)
        self.trainer.step(1)
        return sum(float(loss.asscalar()) for loss in losses)

    def settle(self):
        """Finish the running statistics, to be called before they are read.

        A static_shape graph updates them without telling MXNet's engine, so that a
        reader would not wait by itself. Without synchronization each device has its
        own: those of device 0 are then taken for all, as a checkpoint can hold one set.
        """
        mx.nd.waitall()
        if self.config.norm == "bn":
            for parameter in self.net.collect_params().values():
                if parameter.grad_req == "null":
                    parameter.set_data(parameter.data(self.devices.contexts[0]))

    def predict(self, x, y):
        """Class maps of a batch, and the summed loss of the first output."""
        padding = -len(x) % len(self.devices.contexts)
        rows = np.arange(len(x) + padding) % len(x)
        y_padded = y[rows]
        y_padded[len(x) :] = -1  # a repeated row feeds a device and counts for nothing

        def forward(x_part, y_part):
            output = self.net(x_part)[0]
            return output.argmax(axis=1), self.main_loss(y_part, output)

        shards = self.devices.split(x[rows]), self.devices.split(y_padded)
        results = self.devices.map(forward, *shards)
        classes = np.concatenate([result[0].asnumpy() for result in results])
        loss = sum(float(result[1].asscalar()) for result in results)
        return classes[: len(x)].astype(np.int32), loss

    def evaluate(self, batches):
        """Mean loss per labelled pixel and the confusion matrix of a data set."""
        confusion, total = Confusion(self.num_classes), 0.0
        for x, y in batches:
            prediction, loss = self.predict(x, y)
            interrupts.check()
            confusion.add(y.astype(np.int32), prediction)
            total += loss
        return total / max(1, confusion.counts.sum()), confusion

    def momenta(self):
        """The optimizer's state by index, the same on every device."""
        states = self.trainer._updaters[0].states
        return {k: v.asnumpy() for k, v in states.items() if v is not None}

    def set_momenta(self, momenta):
        for context, updater in zip(self.devices.contexts, self.trainer._updaters):
            for index, value in momenta.items():
                updater.states[index] = mx.nd.array(value, ctx=context)
                updater.states_synced[index] = True
