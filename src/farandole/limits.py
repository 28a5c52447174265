"""Limits on processes and threads, as errors that name the limit."""

import contextlib
import errno
import resource
from collections.abc import Callable, Iterator

__all__ = ["naming_process_limit"]


@contextlib.contextmanager
def naming_process_limit(error_of: Callable[[str], Exception]) -> Iterator[None]:
    """Raise `error_of(problem)` when the system refuses the block a thread or process; `problem` has the remedy."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # Python's threads, and native ones and processes.
        refused = "can't start new thread" in str(error) or getattr(error, "errno", None) == errno.EAGAIN
        if not refused:
            raise
        most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        limit = f"ulimit -u, now {most}" if most != resource.RLIM_INFINITY else "pids.max of its control group"
        raise error_of(
            f"the system refuses another thread or process; raise the limit on processes of this user ({limit}) or "
            "start fewer ranks"
        ) from error
