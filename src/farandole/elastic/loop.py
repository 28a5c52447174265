"""Loop of elastic training: call the function again when ranks were lost or have come."""

import functools
import logging
import re
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from farandole.core import default
from farandole.elastic.state import HostsUpdatedInterrupt, State
from farandole.errors import HorovodInternalError, NotInitializedError

__all__ = ["run", "run_fn"]

# From the texts of native errors for a lost rank and for one that did not come in time.
_LOST = re.compile(r"rank \d+ is lost|waited [\d.]+ s: ")

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Return a function that calls `func(state, *args, **kwargs)` until it returns, whatever ranks come and go.

    Before each call all ranks take over the state of the rank with most commits. When a rank is lost, the others
    restore their last commit; when hosts came or are leaving, they keep their state. Then they meet again in this
    process, without losing models, data or compiled functions, and `func` is called again. In a job that is not elastic
    an error of a lost rank passes through."""

    return run_fn(func, default.rejoin)


def _is_loss(error: BaseException) -> bool:
    """Return whether a rank was lost. Frameworks raise errors of their own classes, with the text of ours.

    TensorFlow and JAX do so for operations in functions, Lightning and Keras may wrap ours."""
    if isinstance(error, NotInitializedError):
        return False
    if isinstance(error, HorovodInternalError) or _LOST.search(str(error)):
        return True
    above = error.__cause__ or error.__context__
    return above is not None and _is_loss(above)


def run_fn(func: Callable[Concatenate[S, P], R], reset: Callable[[int], None]) -> Callable[Concatenate[S, P], R]:
    """Return the loop of `run` around `func`; `reset` lets the ranks meet again, given the commits of the state."""

    def call(state: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        is_reset = default.is_newcomer()
        if is_reset:  # the others train until it asks for its place
            state.prepare()
            reset(state.held_commits)
        while True:
            try:
                if is_reset:
                    state.on_reset()  # callbacks may communicate, so that a rank may be lost here, too
                # Also when hosts have only left: new ranks may have come while the others waited for enough of them.
                if not state.is_shared():
                    state.sync()
                elif is_reset:
                    state.save()  # what the callbacks have set, as `sync` does: the next loss must not take it back
                state.hold()
                return func(state, *args, **kwargs)
            except HostsUpdatedInterrupt:
                log.info("hosts have changed: the ranks meet again")
            except Exception as error:
                if not (default.is_elastic() and _is_loss(error)):
                    raise
                log.info("a rank was lost, the others restore their last commit and meet again: %s", error)
                state.restore()
            reset(state.held_commits)
            is_reset = True

    return functools.update_wrapper(call, func)
