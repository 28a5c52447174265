"""A rank of a `LightningEstimator` that fails while the callbacks of all ranks write checkpoints of failures."""

from pathlib import Path
from typing import Any

import lightning.pytorch as lightning

import farandole.torch as hvd
from farandole.errors import FarandoleError
from farandole.estimators.store import Store
from helpers.estimator_rows import mine, points, shard_of
from helpers.lightning_estimator import Net, job_of, trained


class Failing(Net):
    """Module that fails on rank 1 in its third step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if hvd.rank() == 1 and batch_idx == 2:
            raise ArithmeticError("in step 3")
        return super().training_step(batch, batch_idx)


def fail_with_checkpoints(rank: int, size: int, folder: Path) -> tuple[str, list[str]]:
    """Return this rank's error, and the checkpoints that it wrote."""
    columns, kept = points(32), folder / f"kept{rank}"
    writer = lightning.callbacks.ModelCheckpoint(dirpath=kept, save_on_exception=True)
    job = job_of(Failing(), columns, callbacks=(writer,), store=Store.create(str(folder / "store")))
    try:
        trained(job, shard_of(folder, mine(columns, rank, size)))
    except (ArithmeticError, FarandoleError) as error:
        hvd.shutdown()  # as at the end of a process
        return type(error).__name__, [path.name for path in folder.rglob("*.ckpt")]
    return "no error", []
