"""The predicates of `petastorm.predicates`, for `predicate=` of readers."""

import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from farandole.data.formats.selection import Predicate

__all__ = [
    "PredicateBase",
    "in_intersection",
    "in_lambda",
    "in_negate",
    "in_pseudorandom_split",
    "in_reduce",
    "in_set",
]

Values = Mapping[str, Any]


class PredicateBase(ABC):
    """Base of predicates on the values of a row.

    `make_batch_reader` first calls `do_include` with a pandas frame of a row group, which may return a Series of bool.
    """

    @abstractmethod
    def get_fields(self) -> set[str]:
        """Return the columns that the predicate reads."""

    @abstractmethod
    def do_include(self, values: Values) -> bool:
        """Return whether the row with these values is read."""


class in_set(PredicateBase):
    """Rows whose `predicate_field` is one of `inclusion_values`."""

    def __init__(self, inclusion_values: Collection[Hashable], predicate_field: str) -> None:
        self._values, self._field = set(inclusion_values), predicate_field

    def get_fields(self) -> set[str]:
        return {self._field}

    def do_include(self, values: Values) -> bool:
        return values[self._field] in self._values


class in_intersection(in_set):
    """Rows whose field, a list, holds one of `inclusion_values`; a text counts as one value.

    Selecting raises `ValueError` for a field that is not iterable."""

    def __init__(self, inclusion_values: Collection[Hashable], _predicate_field: str) -> None:  # Petastorm's name
        super().__init__(inclusion_values, _predicate_field)

    def do_include(self, values: Values) -> bool:
        if not isinstance(values[self._field], Iterable):
            raise ValueError(f"'{self._field}' must hold lists for in_intersection, and holds {values[self._field]!r}")
        return not self._values.isdisjoint(np.ravel(values[self._field]).tolist())


class in_lambda(PredicateBase):
    """Rows for which `predicate_func` is true of the values of `predicate_fields`, in the order of that list.

    `state_arg`, unless it is None, is a further argument. Raises `ValueError` for fields without an order."""

    def __init__(
        self, predicate_fields: Sequence[str], predicate_func: Callable[..., bool], state_arg: object = None
    ) -> None:
        if isinstance(predicate_fields, str) or not isinstance(predicate_fields, Sequence):
            raise ValueError(f"predicate_fields must be a list of columns, got {predicate_fields!r}")
        self._fields, self._func = list(predicate_fields), predicate_func
        self._state = () if state_arg is None else (state_arg,)

    def get_fields(self) -> set[str]:
        return set(self._fields)

    def do_include(self, values: Values) -> bool:
        return self._func(*(values[name] for name in self._fields), *self._state)


class in_reduce(PredicateBase):
    """Rows for which `reduce_func`, such as `all` or `any`, is true of the predicates' list of answers."""

    def __init__(self, predicate_list: Sequence[PredicateBase], reduce_func: Callable[[list[bool]], bool]) -> None:
        self._predicates, self._reduce = [_checked(each) for each in predicate_list], reduce_func

    def get_fields(self) -> set[str]:
        return set().union(*(each.get_fields() for each in self._predicates))

    def do_include(self, values: Values) -> bool:
        return self._reduce([each.do_include(values) for each in self._predicates])


class in_negate(PredicateBase):
    """Rows that `predicate` excludes."""

    def __init__(self, predicate: PredicateBase) -> None:
        self._predicate = _checked(predicate)

    def get_fields(self) -> set[str]:
        return self._predicate.get_fields()

    def do_include(self, values: Values) -> bool:
        return not self._predicate.do_include(values)


class in_pseudorandom_split(PredicateBase):
    """Rows of one part of a data set: `fraction_list[subset_index]` of it, by a hash of `predicate_field`'s value.

    Raises `ValueError` if `subset_index` is out of range."""

    def __init__(self, fraction_list: Sequence[float], subset_index: int, predicate_field: str) -> None:
        if not 0 <= subset_index < len(fraction_list):
            raise ValueError(f"subset_index is {subset_index}, and there are {len(fraction_list)} fractions")
        self._field = predicate_field
        low, high = sum(fraction_list[:subset_index]), sum(fraction_list[: subset_index + 1])
        self._low, self._high = low * (sys.maxsize - 1), high * (sys.maxsize - 1)

    def get_fields(self) -> set[str]:
        return {self._field}

    def do_include(self, values: Values) -> bool:
        # Petastorm's hash, so that existing splits stay the same.
        number = int(hashlib.md5(str(values[self._field]).encode(), usedforsecurity=False).hexdigest(), 16)
        return self._low <= number % sys.maxsize < self._high


def _checked(predicate: PredicateBase) -> PredicateBase:
    if not isinstance(predicate, Predicate):
        raise ValueError(f"{predicate!r} is no predicate: it lacks get_fields or do_include")
    return predicate
