"""Interface to the plugins of frameworks: the core's function table, and the addresses of ranks and process sets."""

from pathlib import Path

from farandole import _native
from farandole.core import default
from farandole.core.process_sets.process_set import GlobalProcessSet, ProcessSet, require_registered
from farandole.core.process_sets.registry import GLOBAL
from farandole.errors import InvalidRequest

Address = tuple[int, int]  # the caller's rank id, and the address of a process set


def plugin_path(framework: str) -> Path:
    """Return the path of a framework's plugin, which is installed beside the core."""
    return Path(_native.__file__).with_name(f"_{framework}.so")


def core_table() -> int:
    """Return the address of the table of functions that plugins call."""
    return _native.core_table()


def address_of(process_set: ProcessSet, what: str) -> Address:
    """Return the address by which an operation that runs later finds the caller's engine for `process_set`.

    Before `init()` only the global process set has an address: it then finds the engine that `init()` starts. Raises
    `InvalidRequest` for a set that is not registered, or whose member the caller is not; `what` is the request's
    name."""
    if isinstance(process_set, GlobalProcessSet):
        return default.context().rank_id if default.is_initialized() else 0, GLOBAL
    require_registered(process_set, what)
    address = default.context().sets.address_of(process_set)
    assert address is not None
    if not process_set.included():
        raise InvalidRequest(
            what, f"Rank {default.rank()} is not a member of the provided process set, {process_set!r}"
        )
    return default.context().rank_id, address
