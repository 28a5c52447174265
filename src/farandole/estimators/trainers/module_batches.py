"""A rank's data module: its construction, and its batches for as many steps as a trainer takes."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

from farandole.data import ShardBatch
from farandole.errors import ConfigError
from farandole.estimators.data_module import DataModule
from farandole.estimators.trainers.run import Run


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


class ModuleBatches:
    """A rank's data module, and the batches that it gives, as many as the trainer takes steps.

    `made` makes the batches of its loaders; its second argument tells whether they are for training."""

    _module: DataModule

    def __init__(self, kind: Callable[..., object], run: Run, made: Callable[[ShardBatch, bool], object]) -> None:
        self._kind, self._run = kind, run
        self._loader = RankLoader(run.batches, run.steps, lambda batch: made(batch, True))
        self._held = RankLoader(
            lambda epoch: run.validation_batches(), run.validation_steps, lambda batch: made(batch, False)
        )

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Make the module, and keep it open for the methods below; raises `ConfigError` for an object of another class.

        Its first pass begins with the first of the remaining epochs."""
        run, plan = self._run, self._run.plan
        held = None if plan.files is None else plan.files.held
        made = self._kind(
            **module_arguments(run, self._loader, self._held if run.validation_steps else None),
            train_dir=None if plan.files is None else plan.files.train.url,
            val_dir=None if held is None else held.url,
            inmemory_cache_all=plan.rows.keep,
            storage_options=None if plan.store is None else plan.store.storage_options,
            random_seed=run.checkpoint.seed,
        )
        if not isinstance(made, DataModule):
            raise ConfigError("data_module", f"must make a farandole.spark.data_module.DataModule, got {type(made)}")
        with made as self._module:
            self._loader.epoch = run.checkpoint.epoch
            self._train = _endless(self._module.train_data)
            yield

    def given(self, epoch: int) -> Iterator[object]:
        """Yield the module's batches of an epoch."""
        self._loader.epoch = epoch
        return islice(self._train, self._run.steps)

    def given_to_validate(self) -> Iterator[object]:
        """Yield the module's batches for validation; each call begins with the first one."""
        return islice(_endless(self._module.val_data), self._run.validation_steps)


def module_arguments(
    run: Run, train_loader: Iterable[object], val_loader: Iterable[object] | None
) -> dict[str, object]:
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


def _endless(make: Callable[[], Iterable[object] | None]) -> Iterator[object]:
    """Yield the batches of `make()`, and call it again whenever they are used up.

    Raises `ConfigError` if it returns no batch."""
    while True:
        nothing = True
        for batch in make() or ():
            nothing = False
            yield batch
        if nothing:
            raise ConfigError("data_module", f"gives no batch: {getattr(make, '__qualname__', make)}() is empty")
