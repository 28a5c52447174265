"""Horovod's estimator parameters without an effect here. Setting one logs a warning; its getter returns the value."""

import difflib
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.ml.param import Params

from farandole.errors import ConfigError
from farandole.refusals import IGNORED_PARAMS

__all__ = ["ForeignParams", "refuse_unknown"]

log = logging.getLogger(__name__)

# Names in Horovod's setters and getters that differ from the parameter's own.
_SPELLED: Mapping[str, str] = {
    "shuffling_buffer_size": "shuffle_buffer_size",
    "train_reader_num_worker": "train_reader_num_workers",
    "val_reader_num_worker": "val_reader_num_workers",
}
# Horovod's defaults, where they are not None.
_DEFAULTS: Mapping[str, object] = {
    "partitions_per_process": 10,
    "train_reader_num_workers": 2,
    "val_reader_num_workers": 2,
    "reader_pool_type": "thread",
    "tensorflow_dataset_prefetch_buffer_size": 0,
}


class ForeignParams(Params):
    """Base class of estimators that accept such parameters."""

    def __init__(self) -> None:
        super().__init__()
        self._foreign: Mapping[str, object] = {}

    if not TYPE_CHECKING:  # otherwise mypy would accept every attribute

        def __getattr__(self, name: str) -> "_Setter | _Getter":
            words = re.sub(r"(?<!^)(?=[A-Z])", "_", name[3:]).lower()
            parameter = _SPELLED.get(words, words)
            if parameter in IGNORED_PARAMS and name.startswith("set"):
                return _Setter(self, parameter)
            if parameter in IGNORED_PARAMS and name.startswith("get"):
                return _Getter(self, parameter)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _take_others(self, others: Mapping[str, object], known: Iterable[str]) -> None:
        """Keep arguments without an effect, and log a warning; raise one `ConfigError` that names all unknown ones."""
        given = {name: value for name, value in others.items() if value is not None}
        refuse_unknown(given, known)
        self._foreign = {**self._foreign, **given}


@dataclass(frozen=True, slots=True)
class _Accessor:
    owner: Any
    parameter: str

    @property
    def why(self) -> str:
        """The reason for docs/reference/horovod-api.md."""
        return IGNORED_PARAMS[self.parameter]


class _Setter(_Accessor):
    def __call__(self, value: object) -> Any:
        self.owner._take_others({self.parameter: value}, ())
        return self.owner


class _Getter(_Accessor):
    def __call__(self) -> object:
        return self.owner._foreign.get(self.parameter, _DEFAULTS.get(self.parameter))


def refuse_unknown(names: Iterable[str], known: Iterable[str]) -> None:
    """Log a warning for arguments without an effect; raise one `ConfigError` that names all unknown ones."""
    known, names = sorted(known), sorted(names)
    ignored = [name for name in names if name in IGNORED_PARAMS and name not in known]
    unknown = [name for name in names if name not in ignored]
    if unknown:
        near = [difflib.get_close_matches(name, known, 1) for name in unknown]
        meant = [each[0] for each in near if each]
        hint = f"did you mean {', '.join(meant)}? " if meant else ""
        raise ConfigError(", ".join(unknown), f"no such parameter; {hint}the parameters are {', '.join(known)}")
    if ignored:
        reasons = "; ".join(f"{name} ({IGNORED_PARAMS[name]})" for name in ignored)
        log.warning("these parameters have no effect: %s", reasons)
