"""Checkpoint of a PyTorch run, written after each epoch and read when a fit with the same run id starts."""

import io
from dataclasses import dataclass, field

import torch

from farandole.spark.trainers.report import Record


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state after `epoch` finished epochs, as plain values and tensors.

    The random generators are not in it: each epoch seeds them anew from `seed`, its number and the rank.
    """

    epoch: int = 0
    step: int = 0
    seed: int
    model: dict[str, object] | None = None
    # With the learning rate that the user set, so that any number of resumes, on any number of ranks, scales it once.
    optimizer: dict[str, object] | None = None
    history: list[Record] = field(default_factory=list)
    best: Record | None = None  # the epoch of the smallest validation loss
    outputs: list[tuple[str, list[int]]] | None = None  # type and shape of one row of each output

    def dump(self) -> bytes:
        """Return the file's content."""
        file = io.BytesIO()
        torch.save({name: getattr(self, name) for name in self.__dataclass_fields__}, file)
        return file.getvalue()

    @classmethod
    def load(cls, content: bytes) -> "Checkpoint":
        """Read what `dump` gave; only tensors and plain values, so that a foreign file cannot run code."""
        return cls(**torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
