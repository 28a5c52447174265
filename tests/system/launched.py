"""`farandole run` as a real command, and processes watched for their end."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from helpers.programs import run

PATIENCE = 60.0  # seconds; this machine may be busy
REAPED = 10.0  # seconds: what is killed takes a moment to end, on such a machine too


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "farandole.launch.cli", *words]


def farandole(
    *words: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 120.0,
    framework: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end; with a `framework`, in processes that have imported its modules already."""
    if framework is not None:
        return run(command(*words), framework=framework, env={**os.environ, **(env or {})}, cwd=cwd, timeout=timeout)
    return subprocess.run(
        command(*words),
        env={**os.environ, **(env or {})},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        start_new_session=True,
    )


def wait_for_files(folder: Path, names: Sequence[str]) -> list[int]:
    """Wait until each of the files holds a number and a line's end; gives the numbers."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        texts = [(folder / name).read_text() if (folder / name).exists() else "" for name in names]
        if all(text.endswith("\n") for text in texts):
            return [int(text) for text in texts]
        time.sleep(0.01)
    raise AssertionError(f"only {sorted(each.name for each in folder.iterdir())} came within {PATIENCE} s")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Watch:
    """Notices the end of processes that are nobody's children here; a context manager."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._fds = {os.pidfd_open(pid): pid for pid in pids}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds:
            os.close(fd)

    def survivors(self, timeout: float = PATIENCE) -> list[int]:
        """Wait for all of them to end; those that did not, which are killed: a failing test leaves none."""
        waiting, deadline = set(self._fds), time.monotonic() + timeout
        poller = select.poll()
        for fd in waiting:
            poller.register(fd, select.POLLIN)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for fd, _ in poller.poll(left * 1000):
                poller.unregister(fd)
                waiting.discard(fd)
        for fd in waiting:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        return [self._fds[fd] for fd in waiting]


@contextlib.contextmanager
def launched(
    folder: Path, names: Sequence[str], *words: str, program: Sequence[str] = ()
) -> Iterator[tuple["subprocess.Popen[str]", Watch]]:
    """Start the command in `folder`, in a process group of its own, as a shell does; it is gone afterwards.

    Waits for the files `names`, and watches the processes whose numbers they hold. `program` stands for the command
    if given."""
    with subprocess.Popen(
        [*program, *words] if program else command(*words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=folder,
    ) as process:
        try:
            with Watch(wait_for_files(folder, names)) as watch:
                yield process, watch
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
