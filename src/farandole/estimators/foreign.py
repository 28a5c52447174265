"""Horovod's estimator parameters without an effect here. Setting one logs a warning; its getter returns the value."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farandole.estimators.checked_params import CheckedParams
from farandole.refusals import IGNORED_PARAMS, ignored_param

# Horovod's defaults, where they are not None.
_DEFAULTS: Mapping[str, object] = {
    "partitions_per_process": 10,
    "train_reader_num_workers": 2,
    "val_reader_num_workers": 2,
    "reader_pool_type": "thread",
    "tensorflow_dataset_prefetch_buffer_size": 0,
}


class ForeignParams(CheckedParams):
    """Base class of estimators that accept such parameters."""

    _foreign = dict[str, object]()  # noqa: RUF012  # replaced when a value is set, never changed

    if not TYPE_CHECKING:  # otherwise mypy would accept every attribute

        def __getattr__(self, name: str) -> "_Setter | _Getter":
            parameter = ignored_param(name)
            if parameter is not None:
                return (_Setter if name.startswith("set") else _Getter)(self, parameter)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _take_others(self, others: Mapping[str, object]) -> None:
        """Keep arguments without an effect, and log a warning; raise one `ConfigError` that names all unknown ones."""
        super()._take_others(others)
        self._foreign = {**self._foreign, **others}


@dataclass(frozen=True, slots=True)
class _Accessor:
    owner: ForeignParams
    parameter: str

    @property
    def why(self) -> str:
        """The reason for docs/reference/horovod-api.md."""
        return IGNORED_PARAMS[self.parameter]


class _Setter(_Accessor):
    def __call__(self, value: object) -> ForeignParams:
        if value is not None:
            self.owner._take_others({self.parameter: value})
        return self.owner


class _Getter(_Accessor):
    def __call__(self) -> object:
        return self.owner._foreign.get(self.parameter, _DEFAULTS.get(self.parameter))
