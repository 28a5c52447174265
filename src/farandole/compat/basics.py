"""The class `HorovodBasics` of `horovod.common.basics`."""

import farandole.numpy
from farandole.compat.answers import BASICS

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """The functions that all bindings share, as methods. The arguments name an extension module and are ignored."""

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        self.pkg_path, self.names = pkg_path, args

    def __getattr__(self, name: str) -> object:
        # The shared functions are the same in each binding. NumPy's binding can always be imported.
        if name in BASICS and hasattr(farandole.numpy, name):
            return getattr(farandole.numpy, name)
        raise AttributeError(
            f"farandole {farandole.__version__} does not have {name} yet"
            if name in BASICS
            else f"{type(self).__name__!r} object has no attribute {name!r}"
        )
