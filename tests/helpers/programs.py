"""Runner of tests' Python programs that start with a framework imported; one warm process per framework forks them.

See warm.py."""

import contextlib
import dataclasses
import fcntl
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from helpers.warm import Program, become, preload

TESTS = Path(__file__).parents[1]
WARM = "FARANDOLE_TEST_WARM"  # variable: the folder of the warm processes
END = "end"  # named pipe in that folder, the standard input of warm processes
FORKER = "FARANDOLE_TEST_FORKER"  # variable for Spark's daemons: the path at which a warm process listens
PYTHON = "FARANDOLE_TEST_PYTHON"  # variable for Spark's daemons: the Python of the warm process
LARGEST_REQUEST = 1 << 20
MOST_DESCRIPTORS = 32
ABOVE_ALL = 200  # received descriptors have numbers from here on until they get the requested ones
ROOM = 1 << 16  # bytes for the command line, and for the environment, that /proc shows of a forked program
STARTING = 150.0  # seconds to import a framework, on a busy machine
# The launcher's settings for two ranks on two cores. Libraries read them once, when they are loaded.
THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


_started: list[int] = []  # process ids of the warm processes that this process has started


class WarmFolder:
    """Folder of the warm processes, which all workers of a test run share. Closing it ends them."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="farandole-warm-")  # readable only by its owner
        end = Path(self._folder.name, END)
        os.mkfifo(end)
        self._end = os.open(end, os.O_RDWR)
        os.environ[WARM] = self._folder.name

    def close(self) -> None:
        os.close(self._end)
        self._folder.cleanup()
        del os.environ[WARM]


def _forker(framework: str) -> str:
    """Return the path at which the warm process of `framework`, or that of all frameworks if it runs, listens.

    The first worker that needs a process starts it, which takes 8 seconds."""
    folder = Path(os.environ[WARM])
    with open(folder / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = next((folder / each for each in ("any", framework) if (folder / each).exists()), folder / framework)
        if not path.exists():
            _start_forker(path)
    return str(path)


def _start_forker(path: Path) -> None:
    number = 3
    arguments = [sys.executable, __file__, str(number), path.name, "." * ROOM]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), **THREADS, "ROOM": "." * ROOM}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        files = [
            (os.POSIX_SPAWN_OPEN, 0, str(path.with_name(END)), os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, listener.fileno(), number),
        ]
        _started.append(os.posix_spawn(sys.executable, arguments, environment, file_actions=files, setsid=True))


def fork(
    path: str, program: Program, env: Mapping[str, str], cwd: str, descriptors: Mapping[int, int], *, session: bool
) -> socket.socket:
    """Have the process that listens at `path` fork a program; return a connection.

    The connection receives the program's process id, and its exit code when it has ended. `descriptors` maps the
    program's descriptors to those of this process."""
    request = {
        "program": dataclasses.astuple(program),
        "cwd": cwd,
        "env": dict(env),
        "numbers": list(descriptors),
        "session": session,
    }
    answers = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        answers.settimeout(STARTING)
        answers.connect(path)
        socket.send_fds(answers, [json.dumps(request).encode()], list(descriptors.values()))
    except BaseException:
        answers.close()
        raise
    return answers


class WarmProcess:
    """Forked program with a session of its own and no input, and the methods of subprocess.Popen that tests use.

    `stdout`, `stderr` and `pass_fds` are descriptors. A negative `returncode` is the number of a signal."""

    def __init__(
        self,
        command: Sequence[str],
        framework: str,
        *,
        stdout: int,
        stderr: int,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        program = Program.of(_without_shebang(command))
        if program is None:
            raise ValueError(f"this is no program of {sys.executable}: {list(command)}")
        self.returncode: int | None = None
        with open(os.devnull, "rb") as empty:
            descriptors = {0: empty.fileno(), 1: stdout, 2: stderr, **{each: each for each in pass_fds}}
            environment = os.environ if env is None else env
            folder = os.fspath(cwd or os.getcwd())
            self._answers = fork(_forker(framework), program, environment, folder, descriptors, session=True)
        self.pid = int(self._answers.recv(100))

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._answers.settimeout(timeout)
            try:
                self.returncode = int(self._answers.recv(100))
            except TimeoutError:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0) from None
            self._answers.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired, BlockingIOError):
            self.wait(0)
        return self.returncode


def run(
    command: Sequence[str],
    *,
    framework: str = "torch",
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    merged: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end; `merged` adds stderr to stdout.

    After `timeout` seconds it is killed with its process group, and `TimeoutExpired` is raised."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        errors = (stdout if merged else stderr).fileno()
        process = WarmProcess(command, framework, stdout=stdout.fileno(), stderr=errors, env=env, cwd=cwd)
        try:
            code = process.wait(timeout)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(STARTING)
            raise
        texts = []
        for stream in (stdout, stderr):
            stream.seek(0)
            texts.append(stream.read().decode())
    return subprocess.CompletedProcess(list(command), code, *texts)


def warm_spark(framework: str) -> dict[str, str]:
    """Return variables with which Spark forks the workers of tasks from the warm process of `framework`."""
    return {
        "PYSPARK_SUBMIT_ARGS": "--conf spark.python.daemon.module=helpers.warm_daemon pyspark-shell",
        "PYTHONPATH": str(TESTS),
        FORKER: _forker(framework),
        PYTHON: sys.executable,
    }


def outliving() -> frozenset[str]:
    """Return the process ids of the warm processes."""
    return frozenset(map(str, _started))


def _without_shebang(command: Sequence[str]) -> list[str]:
    """Return the command with Python in front of a script of this environment, such as `farandole`."""
    found = shutil.which(command[0], path=os.path.dirname(sys.executable))
    if found is not None and not os.path.basename(found).startswith("python"):
        return [sys.executable, found, *command[1:]]
    return list(command)


def main(listener: socket.socket, framework: str) -> None:
    """Fork each requested program and report its end, until standard input ends."""
    preload(framework)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ, "asked")
        selector.register(0, selectors.EVENT_READ, "end")
        while True:
            for key, _ in selector.select():
                if key.data == "end":
                    return
                if key.data == "asked":
                    answers, _ = listener.accept()
                    pid = _forked(answers)
                    _tell(answers, pid)
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, answers))
                else:
                    pid, answers = key.data
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    with answers:
                        _tell(answers, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _forked(answers: socket.socket) -> int:
    """Receive a request and fork its program; return the process id."""
    request, descriptors, _, _ = socket.recv_fds(answers, LARGEST_REQUEST, MOST_DESCRIPTORS)
    pid = os.fork()
    if pid == 0:
        _start(json.loads(request), descriptors)
    for each in descriptors:
        os.close(each)
    return pid


def _tell(answers: socket.socket, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the test has closed the connection
        answers.send(str(number).encode())


def _start(asked: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
    if asked["session"]:
        os.setsid()
    high = [fcntl.fcntl(each, fcntl.F_DUPFD, ABOVE_ALL) for each in descriptors]
    for each, number in zip(high, asked["numbers"], strict=True):
        os.dup2(each, number)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    become(Program(*asked["program"]), keep=asked["numbers"])


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
