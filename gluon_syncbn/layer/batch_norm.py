"""The layer: a Gluon block around the operator ``Custom(op_type='gluon_syncbn')``.

The operator computes and exchanges; here are parameters, checks and the graph around
the operator.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import nn

from ..common.arguments import check_bool, check_int, check_real, check_type, pluralize
from ..common.mxnet_version import IS_GLUON_2
from ..mxnet_private.blocks import call_with_parameters, current_trace, is_traced
from ..mxnet_private.library import make_plain
from ..mxnet_private.parameters import contexts_of
from ..native import failures
from .activations import apply, validate
from .graphs import guarded, plain_gradient, watch_graphs
from .masking import MaskedRows, check_mask
from .synchronization import Settings, Synchronization

_INITIALIZERS = (str, dict, mx.init.Initializer, type(None))  # all that MXNet takes


class SyncBatchNorm(nn.BatchNorm):
    r"""Batch normalization over the shards of all devices, as over one whole batch.

    .. math::
        y = \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \gamma + \beta

    where :math:`\mu` and the biased variance :math:`\sigma^2` of each channel are taken
    over every element of that channel on all devices, however unequal the shards are.
    Parameters, their names and files are those of :class:`mxnet.gluon.nn.BatchNorm`.

    Parameters
    ----------
    in_channels : int, default 0
        Number of channels; 0 infers it from the first input.
    num_devices : int or None, default None
        Number of contexts that each hold a shard of the batch. None means the contexts
        that the layer is initialized on when it is first called (or hybridized again).
    momentum : float, default 0.9
        Fraction of the *old* running value that a batch keeps. For the average over
        batches call :func:`recompute_statistics` after training.
    epsilon : float, default 1e-5
        Added to the variance, so in squared units of the input.
    center, scale : bool, default True
        Whether beta and gamma are learned; otherwise beta keeps its initial value and
        gamma is taken as 1.
    use_global_stats : bool, default False
        Normalize with the running statistics in training too, see
        :func:`freeze_statistics`.
    beta_initializer, gamma_initializer : str or Initializer
        As in :class:`mxnet.gluon.nn.BatchNorm`.
    running_mean_initializer, running_variance_initializer : str or Initializer
        As in :class:`mxnet.gluon.nn.BatchNorm`.
    axis : int, default 1
        The axis of the channels, -5 to 4; negative values count from the end.
    unbiased_running_var : bool, default False
        The running variance takes the divisor count - 1 (as cuDNN's BatchNorm does)
        instead of count (as MXNet's own does). The normalization always takes count.
    timeout : float or None, default None
        Seconds that a device waits for the others, ``inf`` for no limit; None means
        :func:`gluon_syncbn.get_timeout`.
    group : None, "machine", "process", list of int, or list of such lists
        With whom the layer synchronizes. None: with all contexts of all processes that
        :func:`gluon_syncbn.distributed.init` has connected. ``"machine"``: with the
        processes of the same machine. ``"process"``: with no other process. A list of
        ranks: with these, of which the own rank is one. A list of such lists: with the
        one that holds the own rank, see :func:`gluon_syncbn.distributed.groups_of`.
    activation : None, "identity", "relu" or "leaky_relu", default None
        What is applied to the normalized values, in the same passes over memory. For
        "leaky_relu" and "identity" (which is no activation) backward reconstructs the
        normalized values from the output, so that MXNet frees the input after forward:
        a net of such layers keeps about half as much. The function stays exact: a layer
        keeps a copy of its input if the values of any channel cannot be reconstructed.
        These are channels with \|gamma\| below \|beta\| / 8 or near the end of the
        dtype's range, and nearly constant ones (variance far below epsilon). None and
        "relu" keep the input. With the others do not write to the output before
        backward.
    slope : float or None, default None
        For "leaky_relu" the factor of negative values (None: 0.01).
    nonfinite : "propagate", "skip" or "raise", default "propagate"
        For a training batch whose mean or variance is not finite in the dtype of the
        running statistics: in float32 a deviation above 1.8e19 is not. "propagate":
        running statistics take it in, as those of BatchNorm do. "skip": they keep their
        values. "raise": an MXNetError at the next wait, which names the layer, the
        call, and the first rank, device and channel whose shard is not finite. The
        output is not modified.
    **kwargs
        ``prefix`` and ``params`` of :class:`mxnet.gluon.Block`.

    Inputs
        - **data**: 2 to 5 dimensions, float16, float32 or float64.
        - **mask** (optional): the shape of `data` without the axis of the channels,
          which is 1 or the last one. Elements where it is 0 are padding: statistics and
          gradients do not depend on them, and their outputs and gradients are 0.

    Outputs
        - **out**: shape and dtype of `data`.

    Raises
    ------
    TypeError
        For an argument of another type, or `data` that is no NDArray or Symbol.
    ValueError
        For a bad argument, or `data` with another number of channels; in a training
        call also if `num_devices` exceeds the number of contexts that the layer is
        initialized on, or `group` does not hold the own rank.
    mxnet.MXNetError
        At the next wait for a result, if the devices do not all arrive within the
        timeout, or disagree about channels, dtype, axis, epsilon or num_devices. The
        text names the layer and the devices. Call :func:`gluon_syncbn.recover` before
        the next step.

    Notes
    -----
    Running statistics are updated in forward, in every call in training mode, recorded
    or not. (MXNet's BatchNorm updates them in backward, so a layer that is used twice
    in one step applies its two updates in the other order.) dgamma and dbeta are each
    shard's own sums: the trainer adds them up over devices as it does for every
    parameter.

    `contrib.amp` runs custom operators in float32; for float16 data cast the net with
    ``net.cast('float16')`` instead, which leaves this layer's parameters in float32.

    References
    ----------
    Ioffe and Szegedy, Batch Normalization, arXiv:1502.03167. Zhang et al., Context
    Encoding for Semantic Segmentation, arXiv:1803.08904.

    Examples
    --------
    >>> from gluon_syncbn import Devices, SyncBatchNorm
    >>> import mxnet as mx
    >>> devices = Devices([mx.cpu(0), mx.cpu(1)])
    >>> layer = SyncBatchNorm(num_devices=2)
    >>> layer.initialize(ctx=devices.contexts)
    >>> shards = devices.split(mx.nd.array([[0.0], [2.0], [4.0]]))
    >>> with mx.autograd.record():
    ...     y = devices.map(layer, shards)
    >>> [[round(float(v), 4) for v in part.asnumpy()[:, 0]] for part in y]
    [[-1.2247, 0.0], [1.2247]]
    """

    def __init__(
        self,
        in_channels: int = 0,
        num_devices: int | None = None,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        center: bool = True,
        scale: bool = True,
        use_global_stats: bool = False,
        beta_initializer: Any = "zeros",
        gamma_initializer: Any = "ones",
        running_mean_initializer: Any = "zeros",
        running_variance_initializer: Any = "ones",
        axis: int = 1,
        unbiased_running_var: bool = False,
        timeout: float | None = None,
        group: str | Sequence | None = None,
        activation: str | None = None,
        slope: float | None = None,
        nonfinite: str = "propagate",
        **kwargs: Any,
    ) -> None:
        momentum, epsilon = check_numbers(momentum, epsilon)
        check_int("axis", axis, minimum=-5, maximum=4)
        check_int("in_channels", in_channels, minimum=0, maximum=2**31 - 1)
        check_bool("center", center)
        check_bool("scale", scale)
        check_bool("use_global_stats", use_global_stats)
        others = num_devices, unbiased_running_var, timeout, group, nonfinite
        settings = Settings(*others).validate()
        built_in = validate(activation, slope)
        initializers = {
            "beta_initializer": beta_initializer,
            "gamma_initializer": gamma_initializer,
            "running_mean_initializer": running_mean_initializer,
            "running_variance_initializer": running_variance_initializer,
        }
        for name, value in initializers.items():
            check_type(name, value, _INITIALIZERS, "a str or mxnet.init.Initializer")
        super().__init__(
            axis=axis,
            momentum=momentum,
            epsilon=epsilon,
            center=center,
            scale=scale,
            use_global_stats=use_global_stats,
            **initializers,
            in_channels=in_channels,
            **kwargs,
        )
        name = _new_name() if IS_GLUON_2 else self.name
        self._sync = Synchronization(name, settings, built_in)

    @property
    def activation(self) -> str | None:
        """The built-in activation; None for none."""
        return self._sync.activation.name

    def _alias(self):
        # The default prefix is a BatchNorm's, so that parameters get the same names.
        return "batchnorm"

    @property
    def num_devices(self) -> int | None:
        """Contexts that hold a shard each; None while that is not known."""
        return self._sync.settings.num_devices or len(self.contexts()) or None

    def contexts(self) -> list[mx.Context]:
        """Contexts that the layer is initialized on, or will be; empty without any."""
        return contexts_of(self.running_mean)

    @property
    def key(self) -> str:
        """The key of the layer's devices in native code."""
        return self._sync.key

    def forward(self, x: Any, mask: Any = None) -> Any:
        """Checks what is known before it runs, then calls or traces the layer."""
        is_graph = is_traced([x])
        is_frozen = self._kwargs["use_global_stats"]
        self._sync.use(self._reg_params.values())
        # A symbol that is not traced for a call belongs to no context.
        trace = current_trace() if is_graph else None
        has_context = not is_graph or trace is not None
        if autograd.is_training() and not is_frozen and has_context:
            self._check_enough_contexts()
            self._sync.check_thread(self.contexts())
        types = mx.nd.NDArray, mx.sym.Symbol
        check_type("data", x, types, "an NDArray or Symbol")
        inputs = (x,) if mask is None else (x, mask)
        if mask is not None:
            check_mask(self.name, x, mask, self._kwargs["axis"], trace)
        if is_graph:
            return call_with_parameters(self, *inputs)
        try:
            if is_frozen:
                return call_with_parameters(self, *inputs)
            make_plain(x)
            return plain_gradient(call_with_parameters(self, *inputs))
        except mx.MXNetError:
            self._check_channels(x)
            raise

    def _compute(
        self,
        F: Any,
        x: Any,
        mask: Any = None,
        gamma: Any = None,
        beta: Any = None,
        running_mean: Any = None,
        running_var: Any = None,
    ) -> Any:
        """The layer as symbols or arrays; Gluon 1 calls it as `hybrid_forward`."""
        operands = _Operands(x, gamma, beta, running_mean, running_var)
        is_np, rows = IS_GLUON_2 or mx.util.is_np_array(), None
        if is_np:
            operands = _Operands(*(o.as_nd_ndarray() for o in operands))
            mask = None if mask is None else mask.as_nd_ndarray()
        if mask is not None:
            rows = MaskedRows(F, operands.x, mask, self._kwargs["axis"])
            operands = operands._replace(x=rows.valid_first())
        if self._kwargs["use_global_stats"]:
            y = self._frozen_forward(F, operands, rows)
        else:
            y = self._synchronized_forward(F, operands, rows)
        if rows is not None:
            y = rows.put_back(y)
        return y.as_np_ndarray() if is_np else y

    if IS_GLUON_2:

        @property
        def name(self) -> str:
            """The layer's place in a net that was converted; before, a number."""
            return self._sync.name

        def infer_shape(self, x: Any, *_mask: Any) -> None:
            """Sets the parameters' shapes before the first call."""
            axis = self._kwargs["axis"]
            if not -x.ndim <= axis < x.ndim:
                raise ValueError(
                    f"SyncBatchNorm '{self.name}': axis {axis} is outside of an input "
                    f"of {x.ndim} dimensions"
                )
            self._check_channels(x)
            super().infer_shape(x)

    else:
        hybrid_forward = _compute

    def _frozen_forward(self, F, operands, rows):
        """MXNet's own operator: nothing is exchanged, so none of ours is needed."""
        axis = self._kwargs["axis"] if rows is None else -1
        y = F.BatchNorm(*operands, name="fwd", **{**self._kwargs, "axis": axis})
        return apply(F, y, self._sync.activation)

    def _synchronized_forward(self, F, operands, rows):
        """The operator and what it needs around it; `rows` are those of a mask."""
        x, *parameters = operands
        is_graph, node = is_traced([x]), {"layer_key": self.key}
        self._sync.update(self.contexts(), self._kwargs)
        if rows is not None:
            parameters.insert(2, rows.count(x))
            node["masked"] = "True"
        if is_graph:
            watch_graphs()
            x = guarded(F, x)
            if current_trace() is None:
                self._sync.keep()
        y = F.Custom(x, *parameters, name="fwd", op_type="gluon_syncbn", **node)
        return guarded(F, y) if is_graph else y

    def _check_channels(self, x):
        """Raises a ValueError that says more than MXNet's "Shape inconsistent"."""
        axis, expected = self._kwargs["axis"], self.gamma.shape[0]
        if -x.ndim <= axis < x.ndim and 0 < expected != x.shape[axis]:
            raise ValueError(
                f"SyncBatchNorm '{self.name}': data has shape {x.shape}, expected "
                f"{expected} channels along axis {axis}"
            )

    def _check_enough_contexts(self):
        contexts, expected = self.contexts(), self._sync.settings.num_devices or 0
        if contexts and expected > len(contexts):
            raise ValueError(
                f"SyncBatchNorm '{self.name}': num_devices={expected}, but "
                f"the layer is initialized on {pluralize(len(contexts), 'context')} "
                f"({', '.join(map(str, contexts))}), so the others can never arrive"
            )
        shared = [c for c in failures.here.contexts if c in contexts]
        if expected == 1 < len(shared):
            raise ValueError(
                f"SyncBatchNorm '{self.name}': num_devices must be {len(shared)} or "
                f"None for a map over {', '.join(map(str, shared))}, got 1. Call "
                f"convert_sync_batchnorm(net, num_devices={len(shared)}), or "
                "initialize the layer on one context."
            )

    def __repr__(self):
        text = super().__repr__()
        activation, slope = self._sync.activation
        text = f"{text[:-1]}, num_devices={self._sync.settings.num_devices}"
        if activation is not None:
            text += f", activation={activation!r}"
        if slope is not None:
            text += f", slope={slope}"
        return f"{text})"


_made = itertools.count()


def _new_name():
    """A name as Gluon 1 would give it."""
    return f"batchnorm{next(_made)}"


class _Operands(NamedTuple):
    x: Any
    gamma: Any
    beta: Any
    running_mean: Any
    running_var: Any


def check_numbers(momentum: float, epsilon: float, of: str = "") -> tuple[float, float]:
    """Momentum and epsilon as floats; messages have `of` after the name."""
    expected, name = "between 0 and 1", f"momentum{of}"
    if momentum is None:
        raise ValueError(
            f"{name} is {expected}, but got None: for the average over batches call "
            "gluon_syncbn.recompute_statistics after training"
        )
    momentum = check_real(name, momentum, expected, lambda v: 0 <= v <= 1)
    expected, name = "a finite number, not negative", f"epsilon{of}"
    return momentum, check_real(name, epsilon, expected, lambda v: 0 <= v < math.inf)
