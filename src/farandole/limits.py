"""Errors that name an exceeded limit on processes, threads or open files."""

import contextlib
import errno
import os
import resource
from collections.abc import Callable, Iterator

SPARE = 64  # open files that a process needs besides the requested ones


@contextlib.contextmanager
def naming_process_limit(error_of: Callable[[str], Exception]) -> Iterator[None]:
    """Raise `error_of(problem)` if the system refuses a thread or process in the block; `problem` has the remedy."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # RuntimeError for threads of Python; EAGAIN for native threads and for processes.
        refused = "can't start new thread" in str(error) or getattr(error, "errno", None) == errno.EAGAIN
        if not refused:
            raise
        most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        limit = f"ulimit -u, now {most}" if most != resource.RLIM_INFINITY else "pids.max of its control group"
        raise error_of(
            f"the system refuses another thread or process; raise the limit on processes of this user ({limit}) or "
            "start fewer ranks"
        ) from error


def require_open_files(more: int, purpose: str, error_of: Callable[[str], Exception]) -> None:
    """Raise `error_of(problem)` unless this process may open `more` files besides its own.

    `problem` names the number needed and the limit. `purpose` says what needs the files, such as "1000 ranks"."""
    most, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], more + max(SPARE, len(os.listdir("/proc/self/fd")))
    if 0 <= most < needed:
        raise error_of(f"{purpose} need {needed} open files in this process, which may have {most}; raise ulimit -n")
