"""States of elastic training: what ranks save, restore, and take over from rank 0."""

import copy
import logging
from array import array
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from farandole.core import default
from farandole.core.operations import kinds
from farandole.core.operations.objects import allgather_object, broadcast_object
from farandole.core.operations.reduction import Max, Reduction
from farandole.core.operations.request import Request
from farandole.elastic.handlers import (
    LoaderStateHandler,
    Resizable,
    Stateful,
    StatefulHandler,
    StateHandler,
    StateLost,
)
from farandole.errors import FarandoleError

__all__ = ["HostsUpdatedInterrupt", "ObjectState", "State"]

log = logging.getLogger(__name__)

T = TypeVar("T")

REMOVED, ADDED = 1, 2  # changes of hosts, as Horovod counts them


class HostsUpdatedInterrupt(FarandoleError, RuntimeError):
    """Hosts of an elastic job came or are leaving: the ranks meet again and go on, with the state that they have.

    With `skip_sync` hosts are only leaving, so that no rank needs another one's state."""

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync

    def __str__(self) -> str:
        what = "are leaving" if self.skip_sync else "have come"
        return f"hosts {what}: run the training function by elastic.run, which lets the ranks meet again"


class Broadcast(Protocol):
    """A function such as `broadcast_object`."""

    def __call__(self, obj: T) -> T: ...


class State:
    """What training holds beside its data, in memory; a subclass saves, restores and synchronizes it.

    `run` makes the calls: `sync` before the function starts, `restore` after a rank was lost, `on_reset` once the
    ranks have met again. A program calls `commit` from time to time: what happens after the last commit is repeated
    when a rank is lost."""

    def __init__(self, bcast_object: Broadcast = broadcast_object, get_rank: Callable[[], int] = default.rank) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits, self._holds, self._told = 0, False, 0
        self._is_newest = False  # this rank holds the commit that rank 0 holds
        self._saves_more = False  # it has saved something since that commit

    @property
    def held_commits(self) -> int:
        """How often the state that this rank holds was committed, on whichever ranks; -1 if it is only its own.

        After a loss the rank with the highest number becomes rank 0, whose state the others take over. So a newcomer
        never gives its own to ranks that have trained."""
        return self._commits if self._holds else -1

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Call `callbacks` after each reset, when ranks have come or gone: to scale the learning rate, for example."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset` and the callbacks; `run` calls this on all ranks when they have met again."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Note a change of hosts, which the next `commit` raises on all ranks: 1 some are leaving, 2 some came, 3 both.

        Horovod's driver calls it, farandole's does not need to. `timestamp` is ignored."""
        self._told |= update_res

    def commit(self) -> None:
        """Save the state, then look for changes of hosts as `check_host_updates` does. All ranks must call it."""
        self._commit()
        self.check_host_updates()

    def _commit(self) -> None:
        self.save()
        self._commits, self._saves_more = self._commits + 1, False

    def check_host_updates(self) -> None:
        """Raise `HostsUpdatedInterrupt` on all ranks if one of them has been told that hosts came or are leaving.

        Commits the state before it raises. All ranks must call it. Blocks until they have; raises
        `HorovodInternalError` if one of them is lost."""
        told, self._told = self._told, 0
        added, removed = default.host_changes()
        changes = bytearray((added or bool(told & ADDED), removed or bool(told & REMOVED)))
        if default.size() > 1:
            # Each rank hears from the launcher by itself; agreeing here lets all of them leave after the same step.
            request = Request(kinds.ALLREDUCE, reduction=Reduction(Max))
            default.membership().engine.run(request, "elastic.host_changes", changes, changes)
        added, removed = map(bool, changes)
        if added or removed:
            # A rank may be lost here, and another one hear of that and not of the hosts: it goes back to its last
            # commit, while this one keeps its state. The number of commits tells these two apart.
            self._commit()
            raise HostsUpdatedInterrupt(skip_sync=not added)

    def is_shared(self) -> bool:
        """Return whether all ranks hold the state of one commit, which is the same on all. All ranks must call it.

        One that a rank has saved since, without `commit`, may be of another step than that of others."""
        mine = array("q", (-self.held_commits, self.held_commits, self._saves_more))
        if default.size() > 1:
            request = Request(kinds.ALLREDUCE, reduction=Reduction(Max))
            default.membership().engine.run(request, "elastic.held_commits", mine, mine)
        least, most, saves_more = -mine[0], mine[1], bool(mine[2])
        self._is_newest = self.held_commits == most >= 0 and not saves_more
        return least == most >= 0 and not saves_more

    def hold(self) -> None:
        """Note that all ranks have rank 0's state, with its number of commits; `run` calls this after `sync`."""
        self._commits = broadcast_object(self._commits, 0, "elastic.commits")
        self._holds, self._saves_more = True, False

    def prepare(self) -> None:
        """Allocate in a newcomer, while the others train, what `sync` will fill; does nothing by default."""

    def reset(self) -> None:
        """Prepare for other ranks than before; does nothing by default."""

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the copy that `save` has made."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take over rank 0's state on all ranks, and save it. All ranks must call it."""
        raise NotImplementedError


class ObjectState(State):
    """State of Python objects, which are attributes: `ObjectState(epoch=0)` has `state.epoch`.

    `save` copies them deeply, `sync` sends rank 0's by cloudpickle. An object with `state_dict` and `load_state_dict`,
    such as a scheduler of the learning rate, stays the same object: a copy of it would change a copy of the optimizer.
    A `farandole.data.Loader` keeps its position among the rows, whatever the number of ranks. Assigning another such
    object to its attribute saves it. Within a list, a tuple or a dictionary such an object is copied, as by Horovod; a
    warning names it."""

    _handlers: dict[str, StateHandler[Any]]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(
        self,
        bcast_object: Broadcast = broadcast_object,
        get_rank: Callable[[], int] = default.rank,
        **kwargs: object,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        for name, value in kwargs.items():
            _warn_of_held(name, value)
        found = {name: self._handler_of(value) for name, value in kwargs.items()}
        self._handlers = {name: handler for name, handler in found.items() if handler is not None}
        for name, handler in self._handlers.items():
            object.__setattr__(self, name, handler.value)
        self._saved_state = {name: value for name, value in kwargs.items() if found[name] is None}
        self._set_attrs()

    def prepare(self) -> None:
        """Let the values allocate what `sync` will fill."""
        for handler in self._handlers.values():
            handler.prepare()

    def save(self) -> None:
        """Keep a copy of everything in memory."""
        self._saves_more = True
        for handler in self._handlers.values():
            handler.save()
        self._saved_state = {name: self._copy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Go back to the copy that `save` has kept, or else take over the next rank 0's state."""
        try:
            for handler in self._handlers.values():
                handler.restore()
        except StateLost:
            self._holds = False
        self._set_attrs()

    def sync(self) -> None:
        """Take over rank 0's state, then save it. A rank that is lost meanwhile leaves the saved one as it was."""
        self._compare_names()
        unchanged = [each for each in self._handlers.values() if self._is_newest and not each.is_changed]
        try:
            for name in sorted(self._handlers):
                self._handlers[name].sync()
            if self._saved_state:
                self._saved_state = self._bcast_object({name: getattr(self, name) for name in self._saved_state})
        except Exception:
            for each in unchanged:
                each.keep()
            raise
        self._set_attrs()
        for handler in self._handlers.values():
            handler.save()

    def _compare_names(self) -> None:
        """Raise `ValueError` on all ranks if one of them has other values to take over by name; blocks until all have.

        They would wait for each other's values."""
        names = allgather_object(sorted(self._handlers), name="elastic.names")
        for rank, each in enumerate(names):
            if each != names[0]:
                raise ValueError(
                    f"the state of rank {rank} has {each or 'no objects'} with a state of their own, that of rank 0 "
                    f"{names[0] or 'none'}; make the state alike on all ranks, and not with None in place of one"
                )

    def reset(self) -> None:
        """Prepare values for the ranks that there are now: share out samples, and drop unfinished gradients."""
        for handler in self._handlers.values():
            handler.reset()

    def _handler_of(self, value: object) -> StateHandler[Any] | None:
        """Return a new handler for `value`; None if it is kept as an object."""
        if isinstance(value, type):
            return None
        if isinstance(value, Resizable):
            return LoaderStateHandler(value)
        return StatefulHandler(value) if isinstance(value, Stateful) else None

    def _copy(self, value: object) -> object:
        return copy.deepcopy(value)

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            # A copy: the program may change the object, a list for example, and go back to the saved one later.
            object.__setattr__(self, name, self._copy(value))

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_handlers", {}):
            self._saves_more = True
            self._handlers[name].set_value(value)


def _warn_of_held(name: str, value: object) -> None:
    """Log a warning for each object with a state of its own that a container holds."""
    if not isinstance(value, dict | list | tuple):
        return
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, Stateful) and not isinstance(each, type):
            kind = type(each).__name__
            log.warning(
                "%s= holds a %s in a %s: the elastic state restores a copy of it, and not the one that the program "
                "uses; give each as an argument of its own: %s_0=, %s_1=",
                *(name, kind, type(value).__name__, name, name),
            )
        _warn_of_held(name, each)
