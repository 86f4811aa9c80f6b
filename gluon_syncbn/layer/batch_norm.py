"""SyncBatchNorm, a Gluon block that calls ``Custom(op_type='gluon_syncbn')``."""

from __future__ import annotations

from functools import partial
from typing import Any

import mxnet as mx
from mxnet import autograd

from ..arguments import check_bool, check_int, check_keywords, check_type, comma_list
from ..mxnet_private.blocks import (
    ComputedBatchNorm,
    given_name,
    is_traced,
    traced_block,
)
from ..mxnet_private.parameters import contexts_of
from ..native.turns import here
from . import guards, native_operator
from .cached_ops import watch_graphs
from .masking import check_mask, normalize_valid
from .synchronization import Settings, Synchronization, apply_activation, check_numbers

PARAMETERS = "gamma", "beta", "running_mean", "running_var"  # the operator's order
_INITIALIZERS = (str, dict, mx.init.Initializer, type(None))


class SyncBatchNorm(ComputedBatchNorm):
    r"""Batch normalization over the whole batch, across all devices.

    .. math::
        y = \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} \gamma + \beta

    The mean :math:`\mu` and the biased variance :math:`\sigma^2` of each channel are
    computed over all elements of that channel on all devices. Shards may have different
    sizes. In inference the layer uses its running statistics and does not synchronize.
    Parameters have the names and shapes of :class:`mxnet.gluon.nn.BatchNorm`, so
    parameter files are interchangeable. :func:`make_parallel` and
    :func:`convert_sync_batchnorm` convert existing nets.

    Parameters
    ----------
    in_channels : int, default 0
        Number of channels. 0 means the number in the first input.
    num_devices : int or None, default None
        Number of contexts that have a shard of each batch. None means all contexts of
        the layer. If they change, call ``hybridize`` again on a hybridized net.
    momentum : float, default 0.9
        Weight of the old running value:
        ``running = momentum * running + (1 - momentum) * batch``. (PyTorch's momentum
        is ``1 - momentum``.) To average over batches, call
        :func:`recompute_statistics` after training.
    epsilon : float, default 1e-5
        Added to the variance, so its unit is the square of the input's unit. (PyTorch's
        name is ``eps``.)
    center : bool, default True
        Whether to learn beta. Otherwise beta keeps its initial value.
    scale : bool, default True
        Whether to learn gamma. Otherwise gamma is 1.
    use_global_stats : bool, default False
        Whether to normalize with the running statistics in training also. See
        :func:`freeze_statistics`.
    beta_initializer, gamma_initializer : str or Initializer
        As in :class:`mxnet.gluon.nn.BatchNorm`.
    running_mean_initializer, running_variance_initializer : str or Initializer
        As in :class:`mxnet.gluon.nn.BatchNorm`.
    axis : int, default 1
        Axis of the channels, -5 to 4. Negative values count from the last axis.
    unbiased_running_var : bool, default False
        Whether the running variance is unbiased, as in cuDNN's BatchNorm. Otherwise it
        is biased, as in MXNet's. The normalization always uses the biased variance.
    timeout : float or None, default None
        Seconds for which a device waits for the other devices; ``inf`` means no limit.
        None means :func:`gluon_syncbn.get_timeout`.
    group : None, "machine" or "process", default None
        The processes with which the layer synchronizes:

        * None: all processes that :func:`gluon_syncbn.distributed.init` has connected.
        * ``"machine"``: the processes on the same machine.
        * ``"process"``: no other process.
    activation : None, "identity", "relu" or "leaky_relu", default None
        Function that is applied after the normalization, in the same pass over memory.
        "leaky_relu" and "identity" also save memory: backward reconstructs the input
        from the output, so MXNet frees the input after forward. Do not write to such an
        output before backward. A layer keeps a copy of its input if a channel cannot be
        reconstructed accurately.
    slope : float or None, default None
        Factor of negative values for "leaky_relu". None means 0.01.
    nonfinite : "propagate", "skip" or "raise", default "propagate"
        What happens to the running statistics if a training batch has a mean or
        variance that is not finite in the dtype of these statistics.

        * "propagate": they become non-finite, as in BatchNorm.
        * "skip": they do not change. The output is the same as with "propagate".
        * "raise": the next wait raises MXNetError, which names the layer, device and
          channel.
    **kwargs
        ``prefix`` and ``params`` of :class:`mxnet.gluon.Block`.

    Inputs
        - **data**: 2 to 5 dimensions, float16, float32 or float64.
        - **mask** (optional): an array with the shape of `data` without the axis of the
          channels. Elements where the mask is 0 are padding: they do not contribute to
          statistics and gradients, and their outputs and gradients are 0.

    Raises
    ------
    TypeError, ValueError
        If an argument or `data` is wrong. A training call also raises ValueError if the
        layer is initialized on fewer contexts than `num_devices`.
    mxnet.MXNetError
        At the next wait for a result, if not all devices call the layer within the
        timeout, or they disagree about channels, dtype, axis, epsilon or num_devices.
        The text names the layer and the devices. Call :func:`gluon_syncbn.recover`
        before the next step.

    Notes
    -----
    Every forward call in training mode updates the running statistics, recorded or not.
    Each device has the gradients of gamma and beta for its shard, which a Trainer sums
    over devices. After :func:`make_parallel` each device has the sum.

    `contrib.amp` runs custom operators in float32. For float16 call
    ``net.cast('float16')``, which does not change this layer's parameters from float32.

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

    @check_keywords
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
        group: str | None = None,
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
        given = num_devices, unbiased_running_var, timeout, group, nonfinite
        settings = Settings(*given, activation, slope).validate()
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
        self._sync = Synchronization(given_name(self), settings)

    @property
    def name(self) -> str:
        """The block's name; in Gluon 2 the path in the converted net, or a number."""
        return self._sync.name

    @property
    def activation(self) -> str | None:
        """The name of the built-in activation, or None."""
        return self._sync.settings.activation

    def _alias(self):
        # The default prefix is a BatchNorm's, so that parameters get the same names.
        return "batchnorm"

    @property
    def num_devices(self) -> int | None:
        """Number of contexts that have a shard, or None while it is unknown."""
        return self._sync.settings.num_devices or len(self.contexts()) or None

    def contexts(self) -> list[mx.Context]:
        """Return the contexts that the layer is or will be initialized on."""
        return contexts_of(self.running_mean)

    def forward(self, x: Any, mask: Any = None) -> Any:
        is_graph = is_traced([x])
        is_frozen = self._kwargs["use_global_stats"]
        self._sync.register(self._reg_params.values())
        # If the program calls the layer with a symbol, there is no context to check.
        has_context = not is_graph or traced_block() is not None
        if autograd.is_training() and not is_frozen and has_context:
            self._check_enough_contexts()
            self._sync.warn_of_plain_loop(self.contexts())
        types = mx.nd.NDArray, mx.sym.Symbol
        check_type("data", x, types, "an NDArray or Symbol")
        inputs = (x,) if mask is None else (x, mask)
        if mask is not None:
            check_mask(self.name, x, mask, self._kwargs["axis"])
        call = partial(super().forward, *inputs)
        if is_graph:
            return call()
        try:
            if is_frozen or native_operator.is_used(x.context):
                return call()
            return guards.call_plainly(x, call)
        except mx.MXNetError:
            self._check_shape(x)
            raise

    def infer_shape(self, x: Any, *mask: Any) -> None:
        self._check_shape(x)
        super().infer_shape(x, *mask)

    def compute(self, F: Any, x: Any, mask: Any = None, **parameters: Any) -> Any:
        axis, values = self._kwargs["axis"], list(map(parameters.get, PARAMETERS))
        if mask is None:
            return self._normalize(F, values, axis, x)
        normalize = partial(self._normalize, F, values, -1)
        return normalize_valid(F, x, mask, axis, normalize)

    def _normalize(self, F, parameters, axis, x, count=None):
        """Normalize x, or if `count` is given, only as many rows of a matrix x."""
        if self._kwargs["use_global_stats"]:
            options = {**self._kwargs, "axis": axis}
            y = F.BatchNorm(x, *parameters, name="fwd", **options)
            return apply_activation(F, y, self._sync.settings)
        is_graph, node = is_traced([x]), {"layer_key": self._sync.key}
        self._sync.update(self.contexts(), self._kwargs)
        if count is not None:
            parameters.insert(2, count)
            node["masked"] = "True"
        if is_graph:
            watch_graphs()
            x = guards.guarded(F, x)
            if traced_block() is None:
                self._sync.kept.add(self._sync)
        elif native_operator.is_used(x.context):
            return native_operator.call([x, *parameters], **node)
        y = F.Custom(x, *parameters, name="fwd", op_type="gluon_syncbn", **node)
        return guards.guarded(F, y) if is_graph else y

    def _check_shape(self, x):
        """Raise a clearer error than MXNet's "Shape inconsistent"."""
        axis, expected = self._kwargs["axis"], self.gamma.shape[0]
        if not -x.ndim <= axis < x.ndim:
            raise ValueError(
                f"SyncBatchNorm '{self.name}': axis must be an axis of an input with "
                f"{x.ndim} dimensions, got {axis}"
            )
        if 0 < expected != x.shape[axis]:
            raise ValueError(
                f"SyncBatchNorm '{self.name}': data must have {expected} channels "
                f"along axis {axis}, got shape {x.shape}"
            )

    def _check_enough_contexts(self):
        contexts, expected = self.contexts(), self._sync.settings.num_devices or 0
        if contexts and expected > len(contexts):
            raise ValueError(
                f"SyncBatchNorm '{self.name}': num_devices must be at most "
                f"{len(contexts)}, got {expected}. The layer is initialized on "
                f"{comma_list(contexts)}. Initialize it on {expected} contexts, or "
                "leave num_devices out."
            )
        shared = [c for c in here.contexts if c in contexts]
        if expected == 1 < len(shared):
            raise ValueError(
                f"SyncBatchNorm '{self.name}': num_devices must be {len(shared)} or "
                f"None for a layer that runs on {comma_list(shared)}, got 1. Call "
                f"convert_sync_batchnorm(net, num_devices={len(shared)}), or "
                "initialize the layer on one context."
            )

    def __repr__(self):
        settings = self._sync.settings
        text = f"{super().__repr__()[:-1]}, num_devices={settings.num_devices}"
        if settings.activation is not None:
            text += f", activation={settings.activation!r}"
        if settings.slope is not None:
            text += f", slope={settings.slope}"
        return f"{text})"


class ActivatedBatchNorm(ComputedBatchNorm):
    """The kind of BatchNorm to which a SyncBatchNorm with an activation is reverted."""

    def compute(self, F: Any, x: Any, **parameters: Any) -> Any:
        values = map(parameters.get, PARAMETERS)
        y = F.BatchNorm(x, *values, name="fwd", **self._kwargs)
        return apply_activation(F, y, self._activation_settings)
