"""Decoded rows in temporary files, for windows that take more memory than a rank may hold."""

import mmap
import os
import tempfile
import threading
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from farandole.data.loading.values import ALIGNMENT, Array, LooseRows, Ragged, SparseRows, ValuesOrLoose
from farandole.errors import CacheError

__all__ = ["TemporaryRows"]

_Kept: TypeAlias = dict[str, ValuesOrLoose]

_SEGMENT = 64 << 20  # bytes of a file; one for each row group would take too many descriptors


class TemporaryRows:
    """Memory in files without names, for any thread. The kernel writes it to the disk when it needs the memory.

    A file is freed with the last array in it. Texts and other objects stay in memory."""

    def __init__(self) -> None:
        self._folder = tempfile.gettempdir()
        self._lock = threading.Lock()
        self._segment: NDArray[np.uint8] = np.empty(0, np.uint8)

    def keep(self, columns: _Kept) -> _Kept:
        """Return the columns, copied to a file; raises `CacheError` if the disk is full."""
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
        made = self._room(array.nbytes).view(array.dtype).reshape(array.shape)
        made[...] = array
        return made

    def _room(self, nbytes: int) -> NDArray[np.uint8]:
        with self._lock:
            if len(self._segment) < nbytes:
                self._segment = self._mapped(max(_SEGMENT, nbytes))
            taken = self._segment[:nbytes]
            self._segment = self._segment[nbytes + -nbytes % ALIGNMENT :]
        return taken

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
