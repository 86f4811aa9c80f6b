"""The net of a random program, and the data of its steps.

Called by program_runner.py. It must not know what the net should compute.
"""

import mxnet as mx
import numpy as np
from mxnet.gluon import HybridBlock, nn

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm
from support.helpers import cpus, set_mode
from support.program_oracle import channel_moves

AWKWARD = -0.5, 0, 1e-6, -1e-12, 3  # gammas, of which some cannot be divided by


class Chains(HybridBlock):
    """Layers in chains that all begin at the input; one may stand in several places.

    Each call of a layer gives an output.
    """

    def __init__(self, program, layers):
        super().__init__()
        self._chains = program.chains
        with self.name_scope():
            self.layers = nn.HybridSequential()
            self.layers.add(*layers)
            self.moves = nn.HybridSequential()
            for number in range(len(layers) + 1):
                self.moves.add(_move(program, number))

    def hybrid_forward(self, F, x):
        outputs = []
        for chain in self._chains:
            y = x
            for number in chain:
                y = self.layers[number](self.moves[number](y))
                outputs.append(self.moves[len(self.layers)](y))
        return outputs


def _move(program, number):
    """A convolution that computes exactly, and brings oneDNN's layouts in."""
    if not program.convolutions:
        return nn.HybridLambda(lambda F, x: x)
    channels = program.shape[1]
    conv = nn.Conv2D(channels, 1, use_bias=False, in_channels=channels)
    conv.weight.grad_req = "null"
    return conv


def make_net(program):
    """The net on its contexts, what is called on each of these, and its layers."""
    contexts = cpus(program.contexts)
    groups = [[contexts[k] for k in part] for part in program.groups]
    group = groups if len(groups) > 1 else None
    norms = [_norm(program, layer, group) for layer in program.layers]
    net = norms[0] if program.bare else Chains(program, norms)
    net.cast(program.dtype)
    _set_requests(program, norms)
    whole = net
    if program.way == "parallel":
        # Conversion would take groups away.
        whole = gluon_syncbn.make_parallel(
            net, contexts, sync_bn=False, batch_axis=program.batch_axis
        )
    elif program.way == "plain_loop":
        gluon_syncbn.allow_plain_loop(net)
    whole.initialize(ctx=contexts)
    _set_parameters(program, net, norms)
    set_mode(whole, program.mode)
    return whole, net, norms


def _norm(program, layer, group):
    known = layer.gammas != "ones"
    return SyncBatchNorm(
        in_channels=program.shape[program.axis] if known else 0,
        momentum=layer.momentum,
        epsilon=layer.epsilon,
        scale=layer.scale,
        center=layer.center,
        use_global_stats=layer.use_global_stats,
        axis=program.axis,
        unbiased_running_var=layer.unbiased,
        group=group,
        activation=layer.activation,
        slope=layer.slope,
    )


def _set_requests(program, norms):
    for layer, norm in zip(program.layers, norms):
        if layer.scale:
            norm.gamma.grad_req = layer.gamma_request
        if layer.center:
            norm.beta.grad_req = layer.beta_request


def _set_parameters(program, net, norms):
    rng = np.random.default_rng(program.seed)
    channels = program.shape[program.axis]
    for layer, norm in zip(program.layers, norms):
        if layer.gammas == "ones":
            continue
        values = {
            "gamma": rng.normal(0, 1, channels),
            "beta": rng.normal(0, 1, channels),
            "running_mean": rng.normal(1, 1, channels),
            "running_var": rng.uniform(0.5, 3, channels),
        }
        if layer.gammas == "awkward":
            values["gamma"] = rng.choice(AWKWARD, channels)
        for name, value in values.items():
            parameter = getattr(norm, name)
            parameter.set_data(mx.nd.array(value, dtype=parameter.dtype))
    for number, move in enumerate(net.moves if program.convolutions else []):
        order, signs = channel_moves(channels, number)
        weight = np.zeros((channels, channels, 1, 1))
        weight[np.arange(channels), order, 0, 0] = signs
        move.weight.set_data(mx.nd.array(weight, dtype=program.dtype))


class Data:
    """The inputs of the net in one step, and the gradients of its outputs.

    Attributes
    ----------
    active : list of int
        The contexts that take part.
    x : list of array
        Per context its shard; None where it sits out.
    dys : list of lists of array
        Per output of the net the same for its gradients.
    """

    def __init__(self, program, number, step):
        self.rows = step.rows
        self.active = [k for k, rows in enumerate(step.rows) if rows is not None]
        self._axis = program.batch_axis
        rng = np.random.default_rng([program.seed, number])
        shape = list(program.shape)
        shape[self._axis] = sum(rows or 0 for rows in step.rows)
        x = _random(program, shape, rng).astype(program.dtype)
        self.x = self.split(x)
        self.dys = [
            self.split(rng.normal(size=shape).astype(program.dtype))
            for _ in sum(program.chains, [])
        ]

    def split(self, whole):
        bounds = np.cumsum([rows or 0 for rows in self.rows])[:-1]
        shards = np.split(whole, bounds, self._axis)
        return [shard if k in self.active else None for k, shard in enumerate(shards)]

    def join(self, shards, part=None):
        """Those of the contexts in `part`, or of all, that take part."""
        members = self.active if part is None else part
        return np.concatenate(
            [shards[k] for k in members if k in self.active], self._axis
        )


def _random(program, shape, rng):
    x = rng.normal(0.5, 2, shape)
    if program.data == "far":
        x += 1e4
    elif program.data == "small":
        x *= 1e-3
    elif program.data == "drifting":  # shards differ in mean and deviation
        rows = np.arange(shape[program.batch_axis])
        column = [-1 if k == program.batch_axis else 1 for k in range(len(shape))]
        x *= 1 + np.reshape(rows, column)
        x += 3 * np.reshape(rows, column)
    elif program.data == "constant":
        one = [1] * len(shape)
        one[program.axis] = shape[program.axis]
        x = np.broadcast_to(rng.normal(size=one), shape)
    return x
