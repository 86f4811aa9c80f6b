#!/usr/bin/env python3
"""Train one of GluonCV's segmentation nets on several devices or processes.

    python scripts/train_segmentation.py                 # handwritten digits, two CPUs
    python scripts/train_segmentation.py --data-root FOLDER --class-names A,B,C
    python scripts/train_segmentation.py --resume RUN    # after an interruption
    python scripts/train_segmentation.py predict RUN IMAGE

FOLDER has images/train/NAME.jpg, labels/train/NAME.png and the same for val. RUN is the
folder that a training writes: run.json, parameters, curves and predictions.
"""

import argparse
import difflib
import itertools
import json
import os
import sys
from functools import partial
from pathlib import Path

from gluon_syncbn import distributed, freeze_statistics, make_parallel  # before mxnet

import gluoncv.data  # noqa: F401, it sets LOAD_TRUNCATED_IMAGES
import mxnet as mx
import numpy as np
from gluoncv import model_zoo as zoo
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from mxnet import autograd, gluon
from PIL import Image, ImageFile
from sklearn.datasets import load_digits
from tqdm import tqdm

MODELS = [zoo.FastSCNN, zoo.FCN, zoo.PSPNet, zoo.DeepLabV3, zoo.DeepLabV3Plus]
MODELS = {kind.__name__: kind for kind in (*MODELS, zoo.danet.DANet, zoo.icnet.ICNet)}
NORMS = {"syncbn": "SyncBatchNorm", "bn": "nn.BatchNorm", "gn": "GroupNorm"}
MEAN, DEVIATION = np.float32([[124, 116, 104], [58, 57, 57]])  # ImageNet's colours
PALETTE = np.vstack([colormaps[name].colors for name in ("tab10", "Set3", "tab20b")])
ImageFile.LOAD_TRUNCATED_IMAGES = False  # if it is True, missing data become grey


class UserError(Exception):
    """A mistake of the user, described in one sentence."""


# ---- Data. Images are uint8 (height, width, 3). The label -1 means unlabelled.


class Digits:
    """Scenes of four handwritten digits from scikit-learn. Splits share no image."""

    classes = ["background", *map(str, range(10))]

    def __init__(self, split, args):
        data, tenth = load_digits(), np.arange(1797) % 10
        chosen = tenth < 9 if split == "train" else tenth == 9
        self.ink, self.digits = data.images[chosen] / 16, data.target[chosen]
        self.items = range(600 if split == "train" else 100)
        self.half = args.crop_size // 2

    def load(self, item):
        rng, half = np.random.default_rng([item, len(self.ink)]), self.half
        image = rng.normal(40, 15, (2 * half, 2 * half, 3))
        label = np.zeros(image.shape[:2], np.int32)
        for y, x in (0, 0), (0, half), (half, 0), (half, half):
            pick, size = rng.integers(len(self.ink)), int(half * rng.uniform(0.7, 1))
            ink = Image.fromarray(self.ink[pick]).resize((size, size), Image.BILINEAR)
            window, ink = np.s_[y : y + size, x : x + size], np.asarray(ink)
            image[window] += ink[..., None] * rng.uniform(80, 200, 3)
            label[window][ink > 0.3] = self.digits[pick] + 1
        return np.clip(image, 0, 255).astype(np.uint8), label


class Folder:
    """A folder with images/SPLIT/NAME.jpg and labels/SPLIT/NAME.png."""

    def __init__(self, split, args):
        root, self.classes = Path(args.data_root), args.class_names.split(",")
        self.unlabelled = [255, args.ignore_label]
        if not root.is_dir():
            raise UserError(f"--data-root must be a folder, got {root}.")
        if len(self.classes) < 2:
            raise UserError("--class-names must name at least 2 classes, as in A,B.")
        paths, labels = sorted((root / "images" / split).glob("*.*")), root / "labels"
        if not paths:
            raise UserError(f"{root}/images/{split} has no images.")
        self.items = [(path, labels / split / f"{path.stem}.png") for path in paths]

    def load(self, item):
        image, label = read(item[0], "RGB"), read(item[1])
        label = np.where(np.isin(label, self.unlabelled), -1, label.astype(np.int32))
        shape, classes = image.shape[:2], len(self.classes)
        if label.shape != shape or label.max() >= classes:
            wanted = f"shape {shape} and values below {classes} (see --ignore-label)"
            got = f"{label.shape} and {label.max()}"
            raise UserError(f"{item[1]} must have {wanted}, got {got}.")
        return image, label


def read(path, mode=None):
    """Return a picture as an array, converted to `mode`."""
    try:
        picture = Image.open(path)
        if mode and picture.mode[0] in "IF":  # convert() would clip values
            raise ValueError(f"it must have 8 bits, got mode {picture.mode}")
        return np.asarray(picture.convert(mode) if mode else picture)
    except Exception as error:  # damaged files fail in many ways
        raise UserError(f"The image {path} cannot be read: {error}.") from None


class Split:
    """The batches of this rank. Crops depend only on seed, epoch and image."""

    def __init__(self, name, args):
        self.data = (Folder if args.data_root else Digits)(name, args)
        self.items = self.data.items[: args.images or None]
        self.args, self.is_training, self.batches = args, name == "train", []
        self.start_epoch(0)
        workers = {"num_workers": 1, "thread_pool": True, "batchify_fn": assemble}
        self.loader = gluon.data.DataLoader(self, batch_sampler=self.batches, **workers)

    def start_epoch(self, epoch):
        """Choose this rank's rows of each batch. All ranks train as many batches."""
        rank, ranks, size = distributed.rank(), distributed.size(), self.args.batch_size
        order, self.epoch = np.arange(len(self.items)), epoch
        if self.is_training:
            np.random.default_rng([self.args.seed, epoch]).shuffle(order)
            if len(order) % size < ranks:
                order = order[: len(order) // size * size]
        batches = [order[k : k + size][rank::ranks] for k in range(0, len(order), size)]
        self.batches[:] = [batch.tolist() for batch in batches if len(batch)]

    def __getitem__(self, index):
        """Return a square crop of an image and of its label map."""
        crop, seed = self.args.crop_size, [self.args.seed, self.epoch, index]
        rng = np.random.default_rng(seed) if self.is_training else None
        image, label = self.data.load(self.items[index])
        short = round(crop * (rng.uniform(1, 1.5) if rng else 1))
        scale = short / min(label.shape)
        size = [max(short, round(side * scale)) for side in label.shape[::-1]]
        image = np.asarray(Image.fromarray(image).resize(size, Image.BILINEAR))
        label = np.asarray(Image.fromarray(label).resize(size, Image.NEAREST))
        room = [side - crop for side in label.shape]
        y, x = rng.integers(0, np.add(room, 1)) if rng else np.floor_divide(room, 2)
        return image[y : y + crop, x : x + crop], label[y : y + crop, x : x + crop]


def assemble(views):
    """Return normalized images as float32 (n, 3, crop, crop), and their labels."""
    images, labels = map(np.stack, zip(*views))
    x = ((images - MEAN) / DEVIATION).transpose(0, 3, 1, 2)
    return np.ascontiguousarray(x), labels.astype(np.float32)


# ---- The net and its training.


class GroupNorm(gluon.HybridBlock):
    """Group normalization over `group_size` channels (Wu and He, arXiv:1803.08494).

    As in the paper, gamma and beta belong to channels. In MXNet 1.9's layer they belong
    to groups.
    """

    def __init__(self, in_channels, group_size):
        super().__init__()
        self.groups = max(1, in_channels // group_size)
        # A convolution of each channel scales and shifts faster than broadcasting.
        self.affine = {
            "kernel": (1, 1),
            "num_filter": in_channels,
            "num_group": in_channels,
        }
        shape = in_channels, 1, 1, 1
        self.gamma = self.params.get("gamma", shape=shape, init="ones")
        self.beta = self.params.get("beta", shape=in_channels, init="zeros")

    def hybrid_forward(self, F, x, gamma, beta):
        one, zero = F.ones(self.groups), F.zeros(self.groups)
        y = F.GroupNorm(x, one, zero, num_groups=self.groups)
        return F.Convolution(y, gamma, beta, **self.affine)


def build_model(args, num_classes):
    """Return a net with GroupNorm, or with BatchNorm, which make_parallel converts."""
    mx.random.seed(args.seed)
    kind, size, loads = MODELS[args.model], args.crop_size, args.pretrained
    options = {"aux": args.model != "FastSCNN", "pretrained_base": loads}
    if args.norm == "gn":
        options["norm_layer"] = partial(GroupNorm, group_size=args.group_size)
    net = kind(num_classes, crop_size=size, **options)
    net.initialize(mx.init.Xavier(magnitude=2), force_reinit=not loads)
    net.collect_params().setattr("lr_mult", 1.0)  # GluonCV sets 10 in the heads
    net.collect_params(".*(gamma|beta|bias)").setattr("wd_mult", 0.0)
    net(mx.nd.zeros((1, 3, size, size)))  # deferred initialization
    net.hybridize(static_alloc=True, static_shape=True)
    return net


class NetWithLoss(gluon.Block):
    """A net that returns each image's summed loss, or in evaluation its classes.

    The net's large outputs stay on the devices that compute them.
    """

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, label):
        outputs, target, losses = self.net(x), mx.nd.maximum(label, 0), []
        if not autograd.is_recording():
            return outputs[0].argmax(axis=1)
        for output in outputs:
            if output.shape[2:] != label.shape[1:]:  # ICNet's coarse outputs
                size = {"height": label.shape[1], "width": label.shape[2]}
                output = mx.nd.contrib.BilinearResize2D(output, **size)
            # CPUs run log_softmax over the last axis in half the time of an inner axis.
            log_p = output.transpose((0, 2, 3, 1)).log_softmax(axis=-1)
            log_p = log_p.pick(target, axis=-1) * (label >= 0)
            losses.append(log_p.sum(axis=(1, 2)) * (-0.4 if losses else -1))
        return mx.nd.add_n(*losses)


class Momentum(mx.optimizer.SGD):
    """SGD whose momenta are saved as arrays. A Trainer would save a pickle."""

    momenta = restored = {}

    def create_state(self, index, weight):
        momentum = super().create_state(index, weight)
        if self.restored:
            self.restored[str(index)].copyto(momentum)
        self.momenta = {**self.momenta, str(index): momentum}
        return momentum


class Engine:
    """A net on its devices, with its trainer. An epoch has `steps` steps."""

    def __init__(self, args, num_classes, steps=1, epochs_done=0):
        contexts = [mx.Context(args.ctx, k) for k in range(args.num_devices)]
        self.net = build_model(args, num_classes)
        self.args, self.num_classes = args, num_classes
        self.parallel = NetWithLoss(self.net)
        synchronizes = args.norm == "syncbn"
        make_parallel(self.parallel, contexts, sync_bn=synchronizes, reset_ctx=True)
        schedule = {"max_update": steps * args.epochs + 1, "warmup_steps": steps}
        rate = mx.lr_scheduler.PolyScheduler(base_lr=args.lr, pwr=0.9, **schedule)
        begin = steps * epochs_done
        options = {"momentum": 0.9, "wd": 1e-4, "begin_num_update": begin}
        self.optimizer = Momentum(lr_scheduler=rate, **options)
        self.trainer = distributed.Trainer(self.net, self.optimizer)

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
        return self.parallel(x, y).asnumpy().astype(np.int32)

    def evaluate(self, batches):
        """Return pixel accuracy and mean IoU of some batches."""
        size = self.num_classes
        counts = np.zeros((size, size))  # pixels per true and predicted class
        for x, y in batches:
            code = (y * size + self.predict(x, y))[y >= 0].astype(int)
            counts += np.bincount(code, minlength=size * size).reshape(size, size)
        counts = summed(counts)
        hit, union = np.diag(counts), counts.sum(0) + counts.sum(1) - np.diag(counts)
        iou = np.sum(hit / np.maximum(union, 1)) / np.sum(union > 0)
        return {"pixel_accuracy": hit.sum() / counts.sum(), "mean_iou": iou}

    def save(self, folder, classes, log):
        """Save the state after an epoch. Renaming run.json commits it."""
        name = f"epoch-{len(log)}"
        run = {"settings": vars(self.args), "classes": classes, "epochs": log}
        try:
            self.net.save_parameters(f"{folder}/{name}.params")
            mx.nd.save(f"{folder}/{name}.states", self.optimizer.momenta)
            for kind in "params", "states":  # saving does not report a full disk
                mx.nd.load(f"{folder}/{name}.{kind}")
        except mx.MXNetError:
            raise UserError(f"{folder} cannot be written: is the disk full?") from None
        (folder / "run.part").write_text(json.dumps(run, indent=1) + "\n")
        os.replace(folder / "run.part", folder / "run.json")
        remove_epochs(folder, keep=name)

    def restore(self, folder, log, resume=False):
        """Load the parameters of a run; to resume it, also the momenta."""
        try:
            self.net.load_parameters(f"{folder}/epoch-{len(log)}.params")
            if resume:
                momenta = mx.nd.load(f"{folder}/epoch-{len(log)}.states")
                for k, parameter in self.optimizer.param_dict.items():
                    if parameter.grad_req != "null":
                        assert momenta[str(k)].shape == parameter.shape
                self.optimizer.restored = momenta
        except Exception:  # a damaged file fails in many ways
            raise UserError(f"{folder}/epoch-{len(log)}.* are damaged.") from None
        return self


def summed(array):
    """Return the sum of an array over all ranks."""
    if distributed.size() > 1:
        from mpi4py import MPI

        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array)
    return array


def remove_epochs(folder, keep=None):
    for path in folder.glob("epoch-*.*"):
        if path.stem != keep:
            path.unlink()


def load(folder):
    """Return the settings of a run, the names of its classes, and its log."""
    try:
        run = json.loads((folder / "run.json").read_text())
        args = settings_parser().parse_args([])
        for name, default in vars(args).items():
            setattr(args, name, type(default)(run["settings"][name]))
        log = [{k: float(v) for k, v in entry.items()} for entry in run["epochs"]]
        return args, run["classes"], [log[0], *log[1:]]
    except Exception:  # a foreign file fails in many ways
        raise UserError(f"{folder}/run.json does not describe a run.") from None


# ---- Pictures.


def painted(label):
    """Return the label map in colours from 0 to 1; unlabelled pixels (-1) are white."""
    return np.where(label[..., None] < 0, 1.0, PALETTE[label % len(PALETTE)])


def save_picture(path, columns, classes):
    """Draw columns of pictures, given by their heads, above a legend of all classes."""
    rows = len(next(iter(columns.values())))
    height, width = next(iter(columns.values()))[0].shape[:2]
    legend = 0.6 + 0.25 * -(-len(classes) // 5)
    size = 9, 9 * rows / len(columns) * height / width + legend
    figure = Figure(size, layout="constrained")
    axes = figure.subplots(rows, len(columns), squeeze=False)
    for column, (head, pictures) in zip(axes.T, columns.items()):
        column[0].set_title(head)
        for axis, picture in zip(column, pictures):
            axis.imshow(picture, interpolation="nearest")
            axis.set_axis_off()
    colours = painted(np.arange(len(classes)))
    handles = [Patch(color=c, label=name) for c, name in zip(colours, classes)]
    figure.legend(handles=handles, loc="outside lower center", ncol=5, frameon=False)
    figure.savefig(path, dpi=120)


def save_curves(path, runs):
    """Draw the log of each run, given by its name."""
    figure = Figure((10, 3.4), layout="constrained")
    for axis, key in zip(figure.subplots(1, 3), ("loss", "pixel_accuracy", "mean_iou")):
        for (name, log), style in zip(runs.items(), ("o-", "s--")):
            values = [entry[key] for entry in log]
            axis.plot(range(1, len(log) + 1), values, style, label=name)
        title = {"loss": "training loss per pixel", "mean_iou": "validation mIoU"}
        axis.set_title(title.get(key, "validation pixel accuracy"))
        axis.set(xlabel="epoch", ylim=(0, None))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)


# ---- The commands.


def train(args, folder, log, beside=None):
    """Train until the last epoch. Only rank 0 writes."""
    batches, val = Split("train", args), Split("val", args)
    classes, is_writer = batches.data.classes, distributed.rank() == 0
    steps, quiet = len(batches.batches), None if is_writer else True
    engine = Engine(args, len(classes), steps, len(log))
    if log:
        engine.restore(folder, log, resume=True)
    elif is_writer:  # an older run
        (folder / "run.json").unlink(missing_ok=True)
        remove_epochs(folder)
    if is_writer:
        devices = f"{args.num_devices * distributed.size()} {args.ctx} contexts"
        work = f"{args.epochs} epochs of {steps} steps with {args.batch_size} images"
        print(f"{args.model} with {NORMS[args.norm]} on {devices}: {work}", flush=True)
    for epoch in range(len(log), args.epochs):
        if epoch >= args.epochs - args.freeze_epochs:
            freeze_statistics(engine.net)
        batches.start_epoch(epoch)
        title = f"epoch {epoch + 1} of {args.epochs}"
        bar = tqdm(batches.loader, title, steps, leave=False, disable=quiet)
        if log:
            bar.set_postfix(mIoU=log[-1]["mean_iou"])
        with np.errstate(invalid="ignore"):
            log.append({"loss": engine.train_epoch(bar, epoch)})
            log[-1].update(engine.evaluate(val.loader))
        if not np.isfinite([*log[-1].values()]).all():
            advice = "Lower --lr. If no pixel has a label, check --ignore-label."
            raise UserError(f"Results must be finite, got {log[-1]}. {advice}")
        if is_writer:
            engine.save(folder, classes, log)
            scores = (f"{key} {value:.3f}" for key, value in log[-1].items())
            print(f"{title}:", *scores, flush=True)
    if is_writer:
        report(engine, val, folder, log, beside)


def report(engine, val, folder, log, beside):
    """Draw curves and a few predictions, also of the run `beside`; print scores."""
    views = [val[k] for k in range(min(4, len(val.items)))]
    images, labels = zip(*views)
    columns = {"image": images, "truth": [painted(label) for label in labels]}
    runs = [(engine, log)]
    if beside:
        args, classes, log = load(beside)
        runs.append((Engine(args, len(classes)).restore(beside, log), log))
    curves = {}
    for engine, log in runs:
        name, iou = NORMS[engine.args.norm], log[-1]["mean_iou"]
        name += f" ({beside})" if name in curves else ""
        curves[name] = log
        columns[f"{name}\nmIoU {iou:.3f}"] = painted(engine.predict(*assemble(views)))
        print(f"validation mIoU {iou:.3f} with {name}")
    save_curves(folder / "curves.png", curves)
    save_picture(folder / "predictions.png", columns, val.data.classes)
    print(f"pictures: {folder}/curves.png, {folder}/predictions.png")
    print(f"next: python {sys.argv[0]} predict {folder} IMAGE")


def predict():
    parser = argparse.ArgumentParser(description="Segment an image with a trained net.")
    parser.add_argument("run", type=Path, help="the folder of a training")
    parser.add_argument("image", type=Path)
    parser.add_argument("--output", default="prediction.png", help="picture to write")
    options = parser.parse_args(sys.argv[2:])
    if not options.output.lower().endswith(".png"):
        parser.error(f"--output must end in .png, got {options.output}")
    (args, classes, log), image = load(options.run), read(options.image, "RGB")
    args.ctx, args.num_devices = "cpu", 1
    net = Engine(args, len(classes)).restore(options.run, log).net
    overlay = image / 510 + painted(segment(net, image, args.crop_size)) / 2
    columns = {options.image.name: [image], f"{args.model}, {args.norm}": [overlay]}
    save_picture(options.output, columns, classes)
    print(f"prediction: {options.output}")


def segment(net, image, crop):
    """Return the class map of an image, in the size of the image."""
    size = image.shape[1::-1]
    scaled = [max(crop, round(side * crop / min(size))) for side in size]
    pixels = np.asarray(Image.fromarray(image).resize(scaled, Image.BILINEAR))
    classes = np.zeros(pixels.shape[:2], np.int32)
    rows, columns = (np.linspace(0, n - crop, -(-n // crop)) for n in classes.shape)
    for y, x in itertools.product(rows.astype(int), columns.astype(int)):
        window = np.s_[y : y + crop, x : x + crop]
        tile, _ = assemble([(pixels[window], classes[window])])
        classes[window] = net(mx.nd.array(tile))[0].argmax(axis=1).asnumpy()[0]
    return np.asarray(Image.fromarray(classes).resize(size, Image.NEAREST))


def settings_parser():
    """Return a parser for the settings that run.json keeps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data-root", default="", help="folder; without it, scikit-learn's digits")
    add("--class-names", default="", help="in label order, separated by commas")
    add("--ignore-label", type=int, default=255, help="ignore this label and 255")
    add("--images", type=int, default=0, help="images per split; 0 means all")
    add("--model", choices=list(MODELS), default="FastSCNN", help="GluonCV's net")
    add("--pretrained", action="store_true", help="download ImageNet's weights")
    add("--crop-size", type=int, default=96, help="pixels, a multiple of 32")
    add("--norm", choices=list(NORMS), default="syncbn", help="norm layer")
    add("--group-size", type=int, default=8, help="channels in a group of GroupNorm")
    add("--freeze-epochs", type=int, default=0, help="last epochs, frozen statistics")
    add("--ctx", choices=["cpu", "gpu"], default="cpu", help="device type")
    add("--num-devices", type=int, default=2, help="contexts of each process")
    add("--epochs", type=int, default=12, help="passes over the training images")
    add("--batch-size", type=int, default=8, help="images on all devices together")
    add("--lr", type=float, default=0.1, help="peak learning rate, after epoch 1")
    add("--seed", type=int, default=0, help="seed for all random numbers")
    return parser


def main():
    if sys.argv[1:2] == ["predict"]:
        return predict()
    parser, log = settings_parser(), []
    names = vars(parser.parse_args([]))
    add = parser.add_argument
    add("--run-dir", type=Path, help="default: runs/DATA-MODEL-NORM")
    add("--resume", type=Path, metavar="RUN", help="continue this run")
    add("--overwrite", action="store_true", help="replace the run in the folder")
    add("--beside", type=Path, metavar="RUN", help="draw this run beside the new one")
    add("--distributed", action="store_true", help="use all processes of mpirun")
    options, unknown = parser.parse_known_args()
    if unknown:
        known = ["--" + name.replace("_", "-") for name in vars(options)]
        near = difflib.get_close_matches(unknown[0].split("=")[0], known, 1)
        advice = f"Did you mean {near[0]}?" if near else "See --help."
        parser.error(f"unknown argument {unknown[0]}. {advice}")
    if options.resume:
        earlier, _, log = load(options.resume)
        parser.set_defaults(**vars(earlier))
        options = parser.parse_args()
    if options.distributed:
        distributed.init()
    args = argparse.Namespace(**{name: getattr(options, name) for name in names})
    for name in "num_devices", "epochs", "crop_size", "batch_size", "group_size", "lr":
        if getattr(args, name) <= 0:
            parser.error(f"{name} must be positive, got {getattr(args, name)}")
    if args.crop_size % 32:
        parser.error(f"crop_size must be a multiple of 32, got {args.crop_size}")
    if args.batch_size < distributed.size():
        parser.error(f"batch_size must be at least {distributed.size()}, one a process")
    data = Path(args.data_root or "digits").absolute().name
    default = Path("runs", f"{data}-{args.model}-{args.norm}")
    folder = options.resume or options.run_dir or default
    if (folder / "run.json").exists() and not (options.resume or options.overwrite):
        raise UserError(f"{folder} has a run: add --overwrite, --resume or --run-dir.")
    if len(log) >= args.epochs:
        more = f"Add --epochs {2 * len(log)} to continue it."
        raise UserError(f"The run in {folder} has all its {len(log)} epochs. {more}")
    if options.beside:
        load(options.beside)  # raises before the training
    folder.mkdir(parents=True, exist_ok=True)
    train(args, folder, log, options.beside)


def exit_code():
    """Run the program, print an error that it raises, and return the exit code."""
    try:
        main()
    except (UserError, OSError, ValueError) as error:  # a full disk is an OSError
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: --resume RUN continues a run", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(exit_code())
