"""A rank's data module: its construction, and its batches for as many steps as a trainer takes."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from farandole.data import ShardBatch
from farandole.errors import ConfigError
from farandole.estimators.data_module import DataModule
from farandole.estimators.trainers.run import Run

__all__ = ["RankLoader", "endless", "module_arguments", "open_module"]


class RankLoader:
    """Loader that a data module receives; each pass yields the rank's batches of `epoch`."""

    def __init__(
        self, batches: Callable[[int], Iterator[ShardBatch]], length: int, made: Callable[[ShardBatch], object]
    ) -> None:
        self._batches, self._length, self._made = batches, length, made
        self.epoch = 0
        self.used = False  # a pass has begun

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[object]:
        self.used = True
        return map(self._made, self._batches(self.epoch))


def module_arguments(run: Run, train_loader: Iterable[Any], val_loader: Iterable[Any] | None) -> dict[str, Any]:
    """Return the arguments that every data module is made with, under Horovod's names."""
    plan = run.plan
    return {
        "train_loader": train_loader,
        "val_loader": val_loader,
        "num_train_epochs": plan.epochs,
        "has_val": val_loader is not None,
        "train_batch_size": plan.rows.batch_size,
        "val_batch_size": plan.rows.val_batch_size,
        "shuffle": plan.rows.shuffle,
        "cur_shard": run.rank,
        "shard_count": run.size,
        "schema_fields": list(plan.rows.columns),
        "steps_per_epoch_train": run.steps,
        "steps_per_epoch_val": run.validation_steps,
        "verbose": plan.verbose > 0,
    }


@contextmanager
def open_module(
    kind: Callable[..., Any], run: Run, train_loader: RankLoader, val_loader: RankLoader | None
) -> Iterator[DataModule]:
    """Make and enter a data module; raises `ConfigError` for an object of another class."""
    plan = run.plan
    held = None if plan.files is None else plan.files.held
    made = kind(
        **module_arguments(run, train_loader, val_loader),
        train_dir=None if plan.files is None else plan.files.train.url,
        val_dir=None if held is None else held.url,
        inmemory_cache_all=plan.rows.keep,
        storage_options=None if plan.store is None else plan.store.storage_options,
        random_seed=run.checkpoint.seed,
    )
    if not isinstance(made, DataModule):
        raise ConfigError("data_module", f"must make a farandole.spark.data_module.DataModule, got {type(made)}")
    with made as entered:
        yield entered


def endless(make: Callable[[], Iterable[Any] | None]) -> Iterator[Any]:
    """Yield the batches of `make()`, and call it again whenever they are used up.

    Raises `ConfigError` if it returns no batch."""
    while True:
        nothing = True
        for batch in make() or ():
            nothing = False
            yield batch
        if nothing:
            raise ConfigError("data_module", f"gives no batch: {getattr(make, '__qualname__', make)}() is empty")
