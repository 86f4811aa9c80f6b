"""A training program as data; its repr makes it again, also after changes by hand.

Made by random_programs.py, run by program_runner.py.
"""

from dataclasses import dataclass
from typing import List, Optional


@dataclass
class Layer:
    """The arguments of a SyncBatchNorm, and what is asked of its parameters."""

    momentum: Optional[float]
    epsilon: float
    scale: bool
    center: bool
    use_global_stats: bool
    unbiased: bool
    activation: Optional[str]
    slope: Optional[float]
    gamma_request: str
    beta_request: str
    gammas: str  # "ones" and zero statistics, as initialized; "normal"; "awkward"


@dataclass
class Step:
    """One thing that the program does.

    kind is "train", "train_unrecorded", "predict", "predict_recorded" or "recover",
    which should succeed, or a training step that fails: "missing" and
    "missing_backward", where context `who` does not call the layer, or "raises", where
    the function called for it does. rows has an element for each context: None where it
    sits out, 0 where it takes part with an empty shard.
    """

    kind: str
    rows: List[Optional[int]]
    backwards: int = 1  # through the one graph
    who: int = 0
    by_map: bool = False  # whether the next map recovers


@dataclass
class Program:
    seed: int
    way: str  # "devices", "parallel" or "plain_loop"
    groups: List[List[int]]  # of contexts that normalize together
    mode: str
    chains: List[List[int]]  # numbers of layers; each call of one gives an output
    bare: bool  # the layer itself is the net
    convolutions: bool  # around layers, for oneDNN's layouts
    dtype: str
    shape: List[int]  # with 0 for the rows
    batch_axis: int
    axis: int
    data: str
    x_request: str
    trainer: bool  # whether Trainer.step follows each recorded training step
    layers: List[Layer]
    steps: List[Step]

    @property
    def contexts(self):
        return sum(map(len, self.groups))

    def part_of(self, context):
        return next(part for part in self.groups if context in part)
