"""Base class of data modules, which make or change the batches of an estimator's ranks."""

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from farandole.errors import ConfigError


class DataModule:
    """The batches of one rank. The estimator makes a data module on each rank with these arguments, and enters it.

    `train_loader` and `val_loader` yield the rank's share of the rows in batches, one epoch per pass. A subclass
    overrides `train_data` and `val_data` to return these batches changed, or other batches, in the same form:
    dictionaries of tensors by column for `TorchEstimator`, (inputs, labels, weights) for `KerasEstimator`. Each method
    is called again when its batches are used up. `val_loader` is None if there are no rows for validation. `train_dir`
    and `val_dir` are the URLs of the Parquet files in a fit to files; in other fits, reading them raises `ConfigError`.
    """

    short_name: str | None = None

    def __init__(
        self,
        *,
        train_loader: Iterable[Any],
        val_loader: Iterable[Any] | None = None,
        train_dir: str | None = None,
        val_dir: str | None = None,
        num_train_epochs: int = 1,
        has_val: bool = True,
        train_batch_size: int = 32,
        val_batch_size: int = 32,
        shuffle: bool = True,
        inmemory_cache_all: bool = False,
        cur_shard: int = 0,
        shard_count: int = 1,
        schema_fields: Sequence[str] | None = None,
        storage_options: Mapping[str, object] | None = None,
        steps_per_epoch_train: int = 1,
        steps_per_epoch_val: int = 1,
        verbose: bool = True,
        random_seed: int = 0,
    ) -> None:
        self.train_loader, self.val_loader = train_loader, val_loader
        self._train_dir, self._val_dir = train_dir, val_dir
        self.num_train_epochs, self.has_val = num_train_epochs, has_val
        self.train_batch_size, self.val_batch_size = train_batch_size, val_batch_size
        self.shuffle, self.inmemory_cache_all, self.random_seed = shuffle, inmemory_cache_all, random_seed
        self.cur_shard, self.shard_count = cur_shard, shard_count
        self.schema_fields, self.storage_options = schema_fields, storage_options
        self.steps_per_epoch_train, self.steps_per_epoch_val = steps_per_epoch_train, steps_per_epoch_val
        self.verbose = verbose

    @property
    def train_dir(self) -> str:
        """The URL of the Parquet files with the rows of all ranks."""
        return _known("train_dir", self._train_dir)

    @property
    def val_dir(self) -> str:
        """The URL of the Parquet files with the rows for validation."""
        return _known("val_dir", self._val_dir)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""

    def train_data(self) -> Iterable[Any]:
        """Return the batches to train on."""
        return self.train_loader

    def val_data(self) -> Iterable[Any] | None:
        """Return the batches for validation."""
        return self.val_loader


class PetastormDataModule(DataModule):
    """The rank's rows, unchanged. The name is that of Horovod's default; Petastorm is not used."""

    short_name = "petastorm"


def _known(name: str, value: str | None) -> str:
    if value is None:
        loader = name.replace("_dir", "_loader")
        raise ConfigError("data_module", f"has no {name}: no Parquet is written; take the rows from self.{loader}")
    return value
