"""The executor of GluonCV's scripts for Faster and Mask R-CNN.

Called by users of these scripts.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx

from ..common.nested import flatten
from ..devices.devices import Devices


class Parallel:
    """Runs forward and backward of each shard in a thread of the shard's context.

    GluonCV's scripts for Faster and Mask R-CNN drive their devices with it. GluonCV's
    own class runs shards of several CPU contexts in one thread, where MXNet makes them
    wait for each other, see :class:`gluon_syncbn.Devices`.

    Parameters
    ----------
    num_workers : int
        As in GluonCV. It has no effect: each context has one thread.
    parallizable : object
        Its ``forward_backward`` takes a shard: arrays of one context, also nested.
    serial_init : bool, default True
        As in GluonCV. It has no effect: contexts are called one after the other.

    Examples
    --------
    >>> import mxnet as mx
    >>> from gluon_syncbn.gluoncv import Parallel
    >>> class Task:
    ...     def forward_backward(self, shard):
    ...         return shard.sum()
    >>> executor = Parallel(2, Task())
    >>> for context in [mx.cpu(0), mx.cpu(1)]:
    ...     executor.put(mx.nd.ones((3,), ctx=context))
    >>> [executor.get().asscalar() for _ in range(2)]
    [3.0, 3.0]
    """

    def __init__(
        self, num_workers: int, parallizable: Any, serial_init: bool = True
    ) -> None:
        self._parallizable = parallizable
        self._shards: list = []
        self._results: list = []
        self._devices: Devices | None = None

    def put(self, x: Any) -> None:
        """Takes a shard, to be run with those of the other contexts.

        Parameters
        ----------
        x : nested list of NDArray
            All on the context that is to run them.

        Raises
        ------
        ValueError
            If there is no array in it.
        """
        arrays = arrays_of(x)
        if not arrays:
            raise ValueError(f"x is {x!r}, expected a shard with at least one NDArray")
        self._shards.append((arrays[0].context, x))

    def get(self) -> Any:
        """The result of the oldest shard whose result was not taken yet.

        Shards run when the first of their results is asked for, one of each context, so
        that no context waits for one that has no work.

        Returns
        -------
        object
            What ``forward_backward`` has returned.

        Raises
        ------
        IndexError
            If there are as many calls of `get` as of `put`.
        """
        if not self._results:
            self._run()
        return self._results.pop(0)

    def _run(self):
        """Runs the oldest shard of each context."""
        if not self._shards:
            raise IndexError("get was called more often than put")
        shards = {}
        while self._shards and self._shards[0][0] not in shards:
            context, shard = self._shards.pop(0)
            shards[context] = shard
        contexts = list(shards)
        if self._devices is None or self._devices.contexts != contexts:
            self._devices = Devices(contexts)
            for net in nets_of(self._parallizable):
                # Mask R-CNN makes it in its first call, for one context only.
                if hasattr(net, "target_generator"):
                    net.target_generator.collect_params().reset_ctx(contexts)
        forward_backward = self._parallizable.forward_backward
        self._results = self._devices.map(forward_backward, list(shards.values()))


def arrays_of(value: Any) -> list[mx.nd.NDArray]:
    """The arrays in nested lists, tuples and dicts."""
    return [leaf for leaf in flatten(value) if isinstance(leaf, mx.nd.NDArray)]


def nets_of(module: Any) -> list[mx.gluon.Block]:
    """The nets that a module calls: itself, or those that it holds."""
    if isinstance(module, mx.gluon.Block):
        return [module]
    values = getattr(module, "__dict__", {}).values()
    held = [value for value in values if hasattr(value, "collect_params")]
    return [net for value in held for net in nets_of(value)]
