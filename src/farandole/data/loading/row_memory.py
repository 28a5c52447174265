"""Memory of decoded rows: ordinary memory, or temporary files for more rows than a rank may hold."""

import math
import mmap
import os
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from farandole.data.loading.values import (
    ALIGNMENT,
    Array,
    LooseRows,
    Ragged,
    SparseRows,
    ValuesOrLoose,
    empty_aligned,
    join_values,
)
from farandole.errors import CacheError

_Columns: TypeAlias = dict[str, ValuesOrLoose]

_SEGMENT = 64 << 20  # bytes of a file; one for each row group would take too many descriptors


class RowMemory:
    """Ordinary memory, for any thread."""

    def keep(self, columns: _Columns) -> _Columns:
        """Return the columns."""
        return columns

    def join(self, parts: Iterable[_Columns], rows: int) -> _Columns | None:
        """Return the rows of all parts; None if these are not `rows` rows, or if the parts' types differ.

        A single part is not copied. Of several, holds one part and the whole: of ragged, sparse and object columns
        twice."""
        single: _Columns | None = None
        arrays: dict[str, Array] = {}
        others: dict[str, list[ValuesOrLoose]] = {}
        done = 0
        for part in parts:
            count = len(next(iter(part.values())))
            if done + count > rows:
                return None
            if count == rows:
                single, done = part, rows
                continue  # a source checks its file after its last part
            for name, values in part.items() if count else ():
                if not isinstance(values, np.ndarray) or values.dtype.hasobject:
                    others.setdefault(name, []).append(values)
                    continue
                if not done:
                    arrays[name] = self._empty((rows, *values.shape[1:]), values.dtype)
                whole = arrays.get(name)
                if whole is None or (whole.dtype, whole.shape[1:]) != (values.dtype, values.shape[1:]):
                    return None
                whole[done : done + count] = values
            done += count
        if single is not None:
            return self.keep(single)
        alike = all(len(set(map(type, found))) == 1 for found in others.values())
        if done != rows or not alike or arrays.keys() & others.keys():
            return None
        return {**arrays, **self.keep({name: join_values(found) for name, found in others.items()})}

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        return empty_aligned(shape, dtype)


class TemporaryRows(RowMemory):
    """Memory in files without names, for any thread. The kernel writes it to the disk when it needs the memory.

    A file is freed with the last array in it. Texts and other objects stay in memory. Raises `CacheError` if the disk
    is full."""

    def __init__(self) -> None:
        self._folder = tempfile.gettempdir()
        self._lock = threading.Lock()
        self._segment: NDArray[np.uint8] = np.empty(0, np.uint8)

    def keep(self, columns: _Columns) -> _Columns:
        """Return the columns, copied to a file."""
        return {name: self._moved(values) for name, values in columns.items()}

    def _moved(self, values: ValuesOrLoose) -> ValuesOrLoose:
        if isinstance(values, LooseRows):
            return LooseRows([self._copied(array) for array in values.single])
        if isinstance(values, Ragged):
            return Ragged(self._copied(values.values), values.offsets)
        if isinstance(values, SparseRows):
            return replace(values, values=self._copied(values.values), indices=self._copied(values.indices))
        return self._copied(values)

    def _copied(self, array: Array) -> Array:
        if array.dtype.hasobject or not array.nbytes:
            return array
        made = self._empty(array.shape, array.dtype)
        made[...] = array
        return made

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        nbytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            if len(self._segment) < nbytes:
                self._segment = self._mapped(max(_SEGMENT, nbytes))
            taken = self._segment[:nbytes]
            self._segment = self._segment[nbytes + -nbytes % ALIGNMENT :]
        return taken.view(dtype).reshape(shape)

    def _mapped(self, nbytes: int) -> NDArray[np.uint8]:
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                # Without room for a page, writing to it would kill the process.
                os.posix_fallocate(file.fileno(), 0, nbytes)
                return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
        except OSError as error:
            problem = f"cannot hold {nbytes} bytes more of the rows that are shuffled together ({error})"
            remedy = "name a folder with more room by TMPDIR, or set a smaller shuffle_window or shuffle_bytes"
            raise CacheError(self._folder, f"{problem}; {remedy}") from error
