"""The parameters that all estimators share: names and defaults that Horovod's users know, checked when they are set."""

import difflib
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeVar

from pyspark.ml.param import Param, Params

import farandole
from farandole.errors import ConfigError
from farandole.refusals import IGNORED_PARAMS, REFUSED_PARAMS
from farandole.spark.store import FilesystemStore

log = logging.getLogger(__name__)

T = TypeVar("T")

# Parameters whose setters and getters Horovod spells in another way.
SPELLED: Mapping[str, str] = {
    "shuffling_buffer_size": "shuffle_buffer_size",
    "train_reader_num_worker": "train_reader_num_workers",
    "val_reader_num_worker": "val_reader_num_workers",
    "in_memory_cache_all": "inmemory_cache_all",
}


def at_least(name: str, least: int) -> Callable[[object], int]:
    """Return a check for whole numbers."""

    def check(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(name, f"must be a whole number >= {least}, got {value!r}")
        return value

    return check


def names_of_columns(name: str) -> Callable[[object], list[str]]:
    """Return a check for lists of column names."""

    def check(value: object) -> list[str]:
        names = list(value) if isinstance(value, (list, tuple)) else []
        if not names or not all(isinstance(each, str) for each in names):
            raise ConfigError(name, f"must be a list of column names, got {value!r}")
        return names

    return check


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError("shuffle", f"must be True or False, got {value!r}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError("run_id", f"must be a text, got {value!r}")
    return value


def _validation(value: object) -> float | str:
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1:
        return float(value)
    raise ConfigError("validation", f"must be a fraction in [0, 1) or the name of a column, got {value!r}")


def _store(value: object) -> FilesystemStore:
    if not isinstance(value, FilesystemStore):
        raise ConfigError("store", f"must be what Store.create(...) returns, got {value!r}")
    return value


def _verbose(value: object) -> int:
    if value not in (0, 1, 2) or isinstance(value, bool):
        raise ConfigError("verbose", f"must be 0 (quiet), 1 (progress) or 2 (all output of the ranks), got {value!r}")
    return at_least("verbose", 0)(value)


def param(name: str, doc: str, check: Callable[[object], T]) -> "Param[T]":
    """Return a parameter whose values `check` makes right, or refuses with `ConfigError`."""
    return Param(Params._dummy(), name, doc, typeConverter=check)


class EstimatorParams(Params):
    """What an estimator is told; `set...` and `get...` for each parameter, as pyspark.ml does it.

    Setters raise `ConfigError` for values that cannot be right.
    """

    num_proc = param("num_proc", "ranks; by default as many as Spark has slots", at_least("num_proc", 1))
    feature_cols = param(
        "feature_cols", "columns that the model takes, one input each", names_of_columns("feature_cols")
    )
    label_cols = param("label_cols", "columns that the loss compares outputs with", names_of_columns("label_cols"))
    validation = param("validation", "fraction of rows, or column whose true rows validate", _validation)
    batch_size = param("batch_size", "rows per step and rank", at_least("batch_size", 1))
    val_batch_size = param("val_batch_size", "the same in validation; batch_size", at_least("val_batch_size", 1))
    epochs = param("epochs", "how often every row is learned, all fits of the run together", at_least("epochs", 1))
    shuffle = param("shuffle", "another order of a rank's rows in each epoch", _flag)
    random_seed = param("random_seed", "of orders, split and ranks; random", at_least("random_seed", 0))
    store = param("store", "where checkpoints and logs are kept; nowhere", _store)
    run_id = param("run_id", "name of the run in the store; fitting again resumes it", _text)
    verbose = param("verbose", "0 quiet, 1 progress, 2 all output of the ranks as well", _verbose)

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(batch_size=32, epochs=1, shuffle=True, verbose=1)

    if not TYPE_CHECKING:  # mypy would take every name for one that is there

        def __getattr__(self, name: str) -> "Foreign":
            """Answer for the setters of Horovod's other parameters; say of the getters why they are not there."""
            words = re.sub(r"(?<!^)(?=[A-Z])", "_", name[3:]).lower()
            parameter = SPELLED.get(words, words)
            why = IGNORED_PARAMS.get(parameter) or REFUSED_PARAMS.get(parameter)
            if why is not None and name.startswith("set"):
                return Foreign(self, parameter, why)
            if why is not None and name.startswith("get"):
                raise AttributeError(f"{name} is not part of farandole {farandole.__version__}: {why}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _value(self, param: "Param[T]") -> T | None:
        # Values given to fit(df, {param: value}) come past the setters, so they are checked here.
        if not self.isDefined(param):
            return None
        value = self.getOrDefault(param)
        return None if value is None else param.typeConverter(value)

    def _required(self, param: "Param[T]") -> T:
        value = self._value(param)
        if value is None:
            raise ConfigError(param.name, f"is not set: {param.doc}")
        return value

    def setNumProc(self, value: int | None) -> Self:
        return self._set(num_proc=value)

    def getNumProc(self) -> int | None:
        return self._value(self.num_proc)

    def setFeatureCols(self, value: Sequence[str]) -> Self:
        return self._set(feature_cols=value)

    def getFeatureCols(self) -> list[str]:
        return self._required(self.feature_cols)

    def setLabelCols(self, value: Sequence[str]) -> Self:
        return self._set(label_cols=value)

    def getLabelCols(self) -> list[str]:
        return self._required(self.label_cols)

    def setValidation(self, value: float | str | None) -> Self:
        return self._set(validation=value)

    def getValidation(self) -> float | str | None:
        return self._value(self.validation)

    def setBatchSize(self, value: int) -> Self:
        return self._set(batch_size=value)

    def getBatchSize(self) -> int:
        return self._required(self.batch_size)

    def setValBatchSize(self, value: int | None) -> Self:
        return self._set(val_batch_size=value)

    def getValBatchSize(self) -> int:
        return self._value(self.val_batch_size) or self.getBatchSize()

    def setEpochs(self, value: int) -> Self:
        return self._set(epochs=value)

    def getEpochs(self) -> int:
        return self._required(self.epochs)

    def setShuffle(self, value: bool) -> Self:
        return self._set(shuffle=value)

    def getShuffle(self) -> bool:
        return self._required(self.shuffle)

    def setRandomSeed(self, value: int | None) -> Self:
        return self._set(random_seed=value)

    def getRandomSeed(self) -> int | None:
        return self._value(self.random_seed)

    def setStore(self, value: FilesystemStore | None) -> Self:
        return self._set(store=value)

    def getStore(self) -> FilesystemStore | None:
        return self._value(self.store)

    def setRunId(self, value: str | None) -> Self:
        return self._set(run_id=value)

    def getRunId(self) -> str | None:
        return self._value(self.run_id)

    def setVerbose(self, value: int) -> Self:
        return self._set(verbose=value)

    def getVerbose(self) -> int:
        return self._required(self.verbose)


@dataclass(frozen=True, slots=True)
class Foreign:
    """The setter of a parameter of Horovod's that is not here: warns or refuses, as the constructor does."""

    owner: EstimatorParams
    parameter: str
    why: str

    def __call__(self, value: object) -> EstimatorParams:
        if value is not None:
            refuse_unknown([self.parameter], ())
        return self.owner


def refuse_unknown(names: Iterable[str], known: Iterable[str]) -> None:
    """Warn of arguments that mean nothing any more, by name; raise `ConfigError` for all others."""
    known = sorted(known)
    ignored = []
    for name in names:
        if name in IGNORED_PARAMS:
            ignored.append(f"{name} ({IGNORED_PARAMS[name]})")
        elif name in REFUSED_PARAMS:
            raise ConfigError(name, f"is not supported: {REFUSED_PARAMS[name]}")
        else:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(name, f"no such parameter; {hint}the parameters are {', '.join(known)}")
    if ignored:
        log.warning("these parameters have no effect: %s", "; ".join(ignored))
