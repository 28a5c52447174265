"""Functions that install compat on the rank on which they are unpickled."""

import functools
import pickle
from collections.abc import Callable
from typing import TypeVar

from farandole.compat.hook import install
from farandole.launch.pickling import dumps

T = TypeVar("T")


class Answering(functools.partial[T]):
    """A function that installs compat where it is unpickled, before its own modules are imported there."""

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickle, (dumps((self.func, self.args, self.keywords)),)


def _unpickle(data: bytes) -> functools.partial[object]:
    install()
    func, args, keywords = pickle.loads(data)
    return functools.partial(func, *args, **keywords)


def answering(fn: Callable[..., T]) -> Callable[..., T]:
    """Return `fn` as one that installs compat where it is unpickled."""
    # It has the function's name, which jobs and their errors show.
    return functools.update_wrapper(Answering(fn), fn, updated=())
