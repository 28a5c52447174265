"""The core's functions for a framework's plugin, and the numbers under which it finds ranks and process sets."""

from pathlib import Path

from farandole import _native
from farandole.core import default
from farandole.core.process_sets.process_set import GlobalProcessSet, ProcessSet, require_registered
from farandole.core.process_sets.registry import GLOBAL
from farandole.errors import InvalidRequest

__all__ = ["Address", "address_of", "core_table", "plugin_path"]

Address = tuple[int, int]  # the caller's rank id, and the number of a process set


def plugin_path(framework: str) -> Path:
    """Return where a framework's plugin was installed: beside the core."""
    return Path(_native.__file__).with_name(f"_{framework}.so")


def core_table() -> int:
    """Return the address of the functions that plugins call."""
    return _native.core_table()


def address_of(process_set: ProcessSet, what: str) -> Address:
    """Return how an operation that runs later finds the caller's engine for `process_set`.

    Without `init()` it is that of the next one, as far as all ranks go. Raises `InvalidRequest` for a set that the job
    does not know, or that the caller is no member of; `what` is being asked for."""
    if isinstance(process_set, GlobalProcessSet):
        return default.context().rank_id if default.is_initialized() else 0, GLOBAL
    require_registered(process_set, what)
    number = process_set.process_set_id
    assert number is not None
    if not process_set.included():
        raise InvalidRequest(
            what, f"Rank {default.rank()} is not a member of the provided process set, {process_set!r}"
        )
    return default.context().rank_id, number
