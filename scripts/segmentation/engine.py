"""One training step, an epoch of them, and an evaluation, on all devices.

The net is made parallel here; the rest reads as if there were one device.
"""

from gluon_syncbn import distributed, make_parallel

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from tqdm import tqdm

from .errors import Diverged
from .metrics import Confusion
from .models import build_model, open_contexts, output_weights
from .processes import summed


def poly_lr(base, step, total, warmup):
    """base (1 - step/total)^0.9, times a linear ramp over the first `warmup` steps."""
    ramp = min(1.0, (step + 1) / warmup) if warmup > 0 else 1.0
    return base * (1 - step / total) ** 0.9 * ramp


def _mean(sums):
    """The mean of some batches' losses per labelled pixel."""
    return float(np.mean(sums[0] / np.maximum(1, sums[1])))


class SegmentationLoss(gluon.HybridBlock):
    """Per image the summed cross entropy of its labelled pixels, of all outputs.

    Each output has a weight. Divided by the labelled pixels of the *whole* batch, the
    images' losses add up to the batch's mean, however it is sharded.
    """

    def __init__(self, weights, size):
        super().__init__()
        self._weights, self._size = weights, size

    def hybrid_forward(self, F, *outputs_and_label):
        *outputs, label = outputs_and_label
        labelled = label >= 0
        target = F.maximum(label, 0)
        losses = []
        for weight, output in zip(self._weights, outputs):
            if output.shape[2:] != label.shape[1:]:  # ICNet's coarse outputs
                output = F.contrib.BilinearResize2D(
                    output, height=self._size, width=self._size
                )
            # Classes last: over an inner axis, log_softmax is twice as slow on CPUs.
            output = F.transpose(output, (0, 2, 3, 1))
            log_p = F.pick(F.log_softmax(output, axis=-1), target, axis=-1)
            losses.append(-weight * F.sum(log_p * labelled, axis=(1, 2)))
        return F.add_n(*losses)


class NetWithLoss(gluon.Block):
    """A net and its loss, computed on each device where the outputs are."""

    def __init__(self, net, loss):
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, x, y):
        return self.loss(*self.net(x), y)


class NetWithClasses(NetWithLoss):
    """The predicted classes beside the loss of the first output."""

    def forward(self, x, y):
        output, *_ = self.net(x)
        return output.argmax(axis=1), self.loss(output, y)


class Engine:
    """A net on its devices with optimizer and learning rate schedule."""

    def __init__(self, config, num_classes, steps_per_epoch):
        contexts = open_contexts(config.ctx, config.num_devices)
        net = build_model(config, num_classes, contexts)
        self.net, self.config, self.num_classes = net, config, num_classes
        self.total = steps_per_epoch * config.epochs
        self.warmup = config.warmup_epochs * steps_per_epoch
        loss = SegmentationLoss(output_weights(config), config.crop_size)
        main_loss = SegmentationLoss((1.0,), config.crop_size)
        # On one device too, where it computes the same: a comparison of numbers of
        # devices is then one of nothing else.
        is_synchronized = config.norm == "syncbn"
        self.criterion = NetWithLoss(net, loss)
        make_parallel(self.criterion, contexts, sync_bn=is_synchronized)
        self.judge = NetWithClasses(net, main_loss)
        make_parallel(self.judge, contexts, sync_bn=is_synchronized)
        options = {"momentum": config.momentum, "wd": config.weight_decay}
        self.trainer = distributed.Trainer(net, "sgd", options)
        # Makes the trainer copy device 0's parameters to the others now. Left to the
        # first step, that copy would race with running statistics: see `_settle`.
        self.trainer.allreduce_grads()

    def train_epoch(self, batches, epoch):
        """Train on a data set once; the mean loss of its batches."""
        self._seed(epoch)
        sums, title = np.zeros((2, batches.count)), f"epoch {epoch + 1}"
        shown = {"total": batches.count, "leave": False, "disable": None}
        bar = tqdm(batches.epoch(epoch), title, **shown)
        for number, (x, y) in enumerate(bar):
            sums[:, number] = self.step(x, y, epoch * batches.count + number)
            if not np.isfinite(sums[0, number]):
                raise Diverged(f"The {title}'s loss is {sums[0, number]}: lower --lr.")
            bar.set_postfix(loss=f"{_mean(sums[:, : number + 1]):.3f}")
        self._settle()
        return _mean(summed(sums))

    def _seed(self, epoch):
        """Seed dropout by epoch and by device of all processes, in its thread."""
        rng = np.random.default_rng([self.config.seed, epoch])
        devices = self.criterion.devices
        contexts = devices.contexts
        first = int(rng.integers(2**30)) + distributed.rank() * len(contexts)
        seeds = range(first, first + len(contexts))
        devices.map(mx.random.seed, seeds, contexts)

    def step(self, x, y, step):
        """Train on one batch; return its summed loss, and its labelled pixels."""
        rate = poly_lr(self.config.lr, step, self.total, self.warmup)
        self.trainer.set_learning_rate(rate)
        labelled = int((y >= 0).sum())
        with autograd.record():
            loss = self.criterion(x, y).sum()
        loss.backward()
        # The mean over all processes' labelled pixels, of which a batch may have none.
        self.trainer.step(labelled or 1e-30)
        return float(loss.asscalar()), labelled

    def _settle(self):
        """Finish the running statistics before they are read.

        A static_shape graph updates them without telling MXNet's engine, so that a
        reader would not wait by itself. Without synchronization each device has its
        own: those of device 0 are then taken for all, as a file can hold one set.
        """
        mx.nd.waitall()
        self.trainer.join()  # processes that had no row of the last batch catch up
        if self.config.norm == "bn":
            for parameter in self.net.collect_params().values():
                if parameter.grad_req == "null":
                    parameter.set_data(parameter.list_data()[0])

    def predict(self, x, y):
        """Class maps of a batch, and the summed loss of the first output."""
        classes, losses = self.judge(x, y)
        return classes.asnumpy().astype(np.int32), float(losses.sum().asscalar())

    def evaluate(self, batches):
        """Mean loss per labelled pixel and the confusion matrix of a data set."""
        confusion, total = Confusion(self.num_classes), 0.0
        for x, y in batches.epoch(0):
            prediction, loss = self.predict(x, y)
            confusion.add(y.astype(np.int32), prediction)
            total += loss
        confusion.counts, total = summed(confusion.counts), summed(total)
        return total / max(1, confusion.counts.sum()), confusion
