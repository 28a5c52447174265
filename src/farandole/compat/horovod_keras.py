"""The names of `horovod.keras` whose arguments differ from those in `horovod.tensorflow.keras`."""

from collections.abc import Iterable
from typing import Any

import farandole.keras as hvd
from farandole.core.operations.compression import Compressor
from farandole.keras import callbacks
from farandole.keras.backend import Optimizer, Tensor, Variable


def DistributedOptimizer(
    optimizer: Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor[Tensor] = hvd.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = hvd.Average,
    num_groups: int = 0,
    groups: int | Iterable[Iterable[Variable]] | None = None,
    **more: Any,
) -> Optimizer:
    """Call `farandole.keras.DistributedOptimizer`; it takes the arguments in `more` by name."""
    return hvd.DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        num_groups=num_groups,
        groups=groups,
        **more,
    )


def allreduce(
    value: Tensor,
    name: str | None = None,
    average: bool | None = True,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Compressor[Tensor] = hvd.Compression.none,
) -> Tensor:
    """Call `farandole.keras.allreduce`; `op` takes precedence over `average`."""
    if op is None:
        op = hvd.Average if average or average is None else hvd.Sum
    return hvd.allreduce(
        value,
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        op=op,
        compression=compression,
    )


class BestModelCheckpoint(callbacks.BestModelCheckpoint):
    """The callback `farandole.keras.callbacks.BestModelCheckpoint` without `save_weights_only`."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        super().__init__(monitor, verbose, mode=mode, save_freq=save_freq)
