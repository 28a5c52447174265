"""`horovod.common.basics.HorovodBasics`: what every framework's module has, as an object."""

import farandole.numpy
from farandole.compat.answers import BASICS

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """`HorovodBasics(__file__, "mpi_lib").rank()`: the arguments, which name an extension module, mean nothing here."""

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        self.pkg_path, self.names = pkg_path, args

    def __getattr__(self, name: str) -> object:
        # What frameworks share is the same in each binding; NumPy's is always there.
        if name in BASICS and hasattr(farandole.numpy, name):
            return getattr(farandole.numpy, name)
        raise AttributeError(
            f"farandole {farandole.__version__} does not have {name} yet"
            if name in BASICS
            else f"{type(self).__name__!r} object has no attribute {name!r}"
        )
