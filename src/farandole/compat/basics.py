"""The class `HorovodBasics` of `horovod.common.basics`."""

import farandole.numpy
from farandole.compat.answers import BASICS
from farandole.core import default


class HorovodBasics:
    """The functions that all bindings share, as methods. The arguments name an extension module and are ignored."""

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        self.pkg_path, self.names = pkg_path, args

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """Return the ranks of each process set that the job knows, by number; raises `ValueError` before `init()`."""
        return {number: list(ranks) for number, ranks in default.context().sets.ranks_by_number.items()}

    def __getattr__(self, name: str) -> object:
        # All bindings share these functions. NumPy's binding needs no framework.
        if name in BASICS and hasattr(farandole.numpy, name):
            return getattr(farandole.numpy, name)
        raise AttributeError(
            f"farandole {farandole.__version__} does not have {name} yet"
            if name in BASICS
            else f"{type(self).__name__!r} object has no attribute {name!r}"
        )


_basics = HorovodBasics()
