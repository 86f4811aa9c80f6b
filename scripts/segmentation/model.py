"""The settings of a run, its net on several devices, and its folder."""

import argparse
import json
import os
import sys
from pathlib import Path

from gluon_syncbn import distributed, make_parallel

import mxnet as mx
import numpy as np
from gluoncv import model_zoo as zoo
from mxnet import autograd, gluon

from .data import UserError

MODELS = [zoo.FastSCNN, zoo.FCN, zoo.PSPNet, zoo.DeepLabV3, zoo.DeepLabV3Plus]
MODELS = {kind.__name__: kind for kind in (*MODELS, zoo.danet.DANet, zoo.icnet.ICNet)}
KINDS = "params", "states"  # the files of arrays
CURVES = "train_loss", "val_loss", "pixel_accuracy", "mean_iou"


def exit_code(work):
    """Run `work()`, print an error that it raises, and return the exit code."""
    try:
        work()
    except (UserError, OSError) as error:  # a full disk is an OSError
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        advice = "train_segmentation.py --resume continues a run"
        print(f"interrupted: {advice}", file=sys.stderr)
        return 130
    return 0


class Parser(argparse.ArgumentParser):
    """A parser for the settings of a run. It raises UserError."""

    def __init__(self, description=""):
        super().__init__(description=description)
        add = self.add_argument
        add("--data-root", default="", help="folder; without it, scikit-learn's digits")
        add("--class-names", default="", help="in label order, separated by commas")
        add("--ignore-label", type=int, default=255, help="ignore this label and 255")
        add("--images", type=int, default=0, help="images per split; 0 means all")
        add("--model", choices=list(MODELS), default="FastSCNN", help="GluonCV's net")
        add("--crop-size", type=int, default=96, help="pixels, a multiple of 32")
        add("--norm", choices=["syncbn", "bn"], default="syncbn", help="norm layer")
        add("--ctx", choices=["cpu", "gpu"], default="cpu", help="device type")
        add("--num-devices", type=int, default=2, help="contexts of each process")
        add("--epochs", type=int, default=12, help="passes over the training images")
        add("--batch-size", type=int, default=8, help="images on all devices together")
        add("--lr", type=float, default=0.1, help="peak learning rate, after epoch 1")
        add("--seed", type=int, default=0, help="seed for all random numbers")

    def error(self, message):
        raise UserError(f"On the command line, {message} (see --help).")

    def settings(self, options):
        """Parse a list of options, check their bounds, and return the settings."""
        values = vars(self.parse_args(options))
        least = dict(num_devices=1, crop_size=32, lr=1e-9, epochs=1, seed=0, images=0)
        for name, bound in {**least, "batch_size": distributed.size()}.items():
            if not bound <= values[name] < 2**31:
                text = f"{name} must be at least {bound} and below 2**31"
                self.error(f"{text}, got {values[name]}")
        if values["crop_size"] % 32:
            self.error(f"crop_size must be a multiple of 32, got {values['crop_size']}")
        names = vars(Parser().parse_args([]))  # excludes options that scripts add
        return argparse.Namespace(**{name: values[name] for name in names})


def build_model(args, num_classes, contexts):
    """Return a net with MXNet's BatchNorm, which make_parallel converts.

    GluonCV's own argument `norm_layer` does not reach all layers.
    """
    try:
        mx.nd.zeros(1, ctx=contexts[-1]).wait_to_read()
    except mx.MXNetError:
        raise UserError(f"MXNet finds no device {contexts[-1]}.") from None
    mx.random.seed(args.seed)
    kind, size = MODELS[args.model], args.crop_size
    options = {"aux": args.model != "FastSCNN", "pretrained_base": False}
    net = kind(num_classes, crop_size=size, ctx=contexts, **options)
    net.initialize(mx.init.Xavier(magnitude=2), ctx=contexts, force_reinit=True)
    net.collect_params().setattr("lr_mult", 1.0)  # GluonCV sets 10 in the heads
    net.collect_params(".*(gamma|beta|bias)").setattr("wd_mult", 0.0)
    net(mx.nd.zeros((1, 3, size, size), ctx=contexts[0]))  # deferred initialization
    net.hybridize(static_alloc=True, static_shape=True)
    return net


class NetWithLoss(gluon.Block):
    """A net that returns each image's summed loss; in evaluation also its classes."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, label):
        outputs, target, losses = self.net(x), mx.nd.maximum(label, 0), []
        is_training = autograd.is_recording()
        for output in outputs if is_training else outputs[:1]:
            if output.shape[2:] != label.shape[1:]:  # ICNet's coarse outputs
                size = {"height": label.shape[1], "width": label.shape[2]}
                output = mx.nd.contrib.BilinearResize2D(output, **size)
            # CPUs run log_softmax over the last axis in half the time of an inner axis.
            log_p = output.transpose((0, 2, 3, 1)).log_softmax(axis=-1)
            log_p = log_p.pick(target, axis=-1) * (label >= 0)
            losses.append(log_p.sum(axis=(1, 2)) * (-0.4 if losses else -1))
        loss = mx.nd.add_n(*losses)
        return loss if is_training else (loss, outputs[0].argmax(axis=1))


class Momentum(mx.optimizer.SGD):
    """SGD whose momenta can be saved as arrays. Trainer would save pickles."""

    momenta = restored = {}

    def create_state(self, index, weight):
        momentum = super().create_state(index, weight)
        if self.restored:
            self.restored[str(index)].copyto(momentum)
        self.momenta = {**self.momenta, str(index): momentum}
        return momentum


class Engine:
    """A net on its devices, with its optimizer. An epoch has `steps` steps."""

    def __init__(self, args, num_classes, steps=1, epochs_done=0):
        contexts = [mx.Context(args.ctx, k) for k in range(args.num_devices)]
        net = build_model(args, num_classes, contexts)
        self.net, self.args, self.num_classes = net, args, num_classes
        self.parallel = NetWithLoss(net)
        make_parallel(self.parallel, contexts, sync_bn=args.norm == "syncbn")
        schedule = {"max_update": steps * args.epochs + 1, "warmup_steps": steps}
        rate = mx.lr_scheduler.PolyScheduler(base_lr=args.lr, pwr=0.9, **schedule)
        options = {"momentum": 0.9, "wd": 1e-4, "begin_num_update": steps * epochs_done}
        self.optimizer = Momentum(lr_scheduler=rate, **options)
        self.trainer = distributed.Trainer(net, self.optimizer)

    def train_epoch(self, batches, epoch):
        """Train for one epoch; return the loss of all outputs per labelled pixel."""
        devices, sums = self.parallel.devices, np.zeros(2)
        first = 1000 * (self.args.seed + epoch) + len(devices) * distributed.rank()
        dropout_seeds = [first + k for k in range(len(devices))]
        devices.map(mx.random.seed, dropout_seeds, devices.contexts)
        for x, y in batches:
            labelled = np.sum(y >= 0)
            with autograd.record():
                loss = self.parallel(x, y).sum()
            loss.backward()
            self.trainer.step(float(labelled) or 1e-30)  # step must not divide by 0
            sums += loss.asscalar(), labelled
        # MXNet's engine is unaware that static_shape graphs write statistics.
        mx.nd.waitall()
        if self.args.norm == "bn":  # only the first device's statistics are saved
            for parameter in self.net.collect_params(".*running.*").values():
                parameter.set_data(parameter.list_data()[0])
        return float(np.divide(*summed(sums)))

    def predict(self, x, y):
        """Return the summed loss and the class maps of a batch."""
        losses, classes = self.parallel(x, y)
        return float(losses.sum().asscalar()), classes.asnumpy().astype(np.int32)

    def evaluate(self, batches):
        """Return loss, pixel accuracy and mean IoU of some batches."""
        size, total = self.num_classes, np.zeros(1)
        counts = np.zeros((size, size))  # pixels per true and predicted class
        for x, y in batches:
            loss, prediction = self.predict(x, y)
            code = (y * size + prediction)[y >= 0].astype(int)
            counts += np.bincount(code, minlength=size * size).reshape(size, size)
            total += loss
        total, counts = summed(total), summed(counts)
        hit, pixels = np.diag(counts), counts.sum()
        union = counts.sum(0) + counts.sum(1) - hit
        iou = np.sum(hit / np.maximum(union, 1)) / np.sum(union > 0)
        scores = total[0] / pixels, hit.sum() / pixels, iou
        return dict(zip(CURVES[1:], map(float, scores)))


def summed(array):
    if distributed.size() > 1:
        from mpi4py import MPI

        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array)
    return array


def save(folder, engine, classes, log):
    """Save parameters and momenta as arrays, without pickles, and the log as JSON.

    A script that is killed leaves the former epoch or this one, because only the rename
    of run.json replaces one by the other.
    """
    run = {"settings": vars(engine.args), "classes": classes, "epochs": log}
    names = params, states = [f"{folder}/run-{len(log)}.{kind}" for kind in KINDS]
    try:
        engine.net.save_parameters(params)
        mx.nd.save(states, engine.optimizer.momenta)
        for name in names:  # mx.nd.save does not report a full disk
            mx.nd.load(name)
    except mx.MXNetError:
        raise UserError(f"{folder} cannot be written: is the disk full?") from None
    (folder / "json.part").write_text(json.dumps(run, indent=1) + "\n")
    os.replace(folder / "json.part", folder / "run.json")
    for kind in KINDS:
        for other in folder.glob(f"run-*.{kind}"):
            if str(other) not in names:
                other.unlink()


def arrays_of(folder, kind):
    """Return the path of the parameters or momenta of a run's latest epoch."""
    epochs = json.loads((Path(folder) / "run.json").read_text())["epochs"]
    return f"{folder}/run-{len(epochs)}.{kind}"


def load(folder):
    try:
        run = json.loads((folder / "run.json").read_text())
        settings = run["settings"].items()
        options = [f"--{k.replace('_', '-')}={v}" for k, v in settings]
        Parser().settings(options)
        log = [{key: float(entry[key]) for key in CURVES} for entry in run["epochs"]]
        return options, [str(name) for name in run["classes"]], [log[0], *log[1:]]
    except Exception:  # a foreign file fails in many ways
        raise UserError(f"{folder}/run.json does not describe a run.") from None


def restore(net, folder, optimizer=None):
    """Load the parameters of a run, and the momenta if there is an optimizer."""
    try:
        net.load_parameters(arrays_of(folder, "params"))
        if optimizer:
            optimizer.restored = mx.nd.load(arrays_of(folder, "states"))
            for k, parameter in optimizer.param_dict.items():
                if parameter.grad_req != "null":
                    assert optimizer.restored[str(k)].shape == parameter.shape
    except Exception:  # a damaged file fails in many ways
        raise UserError(f"a run-*.params or .states in {folder} is damaged.") from None
