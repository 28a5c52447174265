"""One rank's process and its guard."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from farandole.launch import processes
from farandole.launch.failures import Exit
from farandole.launch.guard import Guard
from farandole.launch.processes import GUARD, RankProcess
from system.launched import Watch, wait_for_files

LONG = timedelta(seconds=20)
NO_TIME = timedelta(0)


class Heard:
    """Collects the lines of a rank; an event for the first."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str, str]] = []
        self.first = threading.Event()

    def __call__(self, rank: int, stream: str, line: str) -> None:
        self.lines.append((rank, stream, line))
        self.first.set()


@contextmanager
def started(command: Sequence[str], heard: Heard, **more: object) -> Iterator[RankProcess]:
    process = RankProcess.start(command, os.environ, rank=3, on_line=heard, **more)  # type: ignore[arg-type]
    try:
        yield process
    finally:
        process.terminate(NO_TIME)
        assert process.wait_gone(LONG)


def finish(command: Sequence[str], heard: Heard | None = None) -> tuple[Exit, RankProcess]:
    with started(command, heard or Heard()) as process:
        exit = process.wait(LONG)
        assert exit is not None
    return exit, process


@pytest.mark.parametrize(
    ("script", "code", "reason"),
    [
        ("true", 0, "exited with code 0"),
        ("exit 3", 3, "exited with code 3"),
        ("kill -KILL $$", -9, "was killed by SIGKILL (the system's out-of-memory killer does that; so does `kill -9`)"),
        ("kill -TERM $$", -15, "was killed by SIGTERM"),
        ("ulimit -c 0; kill -SEGV $$", -11, "was killed by SIGSEGV (a crash in native code)"),
    ],
)
def test_exit(script: str, code: int, reason: str) -> None:
    exit, _ = finish(["sh", "-c", script])
    assert (exit.rank, exit.code, exit.reason) == (3, code, reason)


@pytest.mark.parametrize(
    ("program", "code", "why"),
    [("no-such-program", 127, "No such file or directory"), ("/tmp", 126, "Permission denied")],
)
def test_what_cannot_be_executed(program: str, code: int, why: str) -> None:
    exit, process = finish([program])
    assert (exit.code, exit.reason) == (code, f"could not be started: {program}: {why}")
    assert process.pid is None


def test_lines_of_both_streams_and_the_last_of_them() -> None:
    heard = Heard()
    _, process = finish(["sh", "-c", "seq 100; echo oops >&2; printf end"], heard)
    assert [line for _, stream, line in heard.lines if stream == "stdout"] == [*map(str, range(1, 101)), "end"]
    assert (3, "stderr", "oops") in heard.lines
    assert len(process.tail) == 50
    assert {"oops", "end"} <= set(process.tail)


def test_no_input_and_the_default_signals() -> None:
    heard = Heard()
    finish(["sh", "-c", "cat; grep -E 'SigIgn|SigBlk' /proc/self/status; yes | head -1"], heard)
    masks = [int(line.split()[1], 16) for _, _, line in heard.lines if line.startswith("Sig")]
    # Two signals are the C library's own; make leaves them ignored, and no program can change that.
    ours = sum(1 << (number - 1) for number in signal.valid_signals())
    assert [mask & ours for mask in masks] == [0, 0]
    assert heard.lines[-1] == (3, "stdout", "y")


@pytest.mark.parametrize(("kept", "code"), [(signal.SIG_IGN, 0), (signal.SIG_DFL, -signal.SIGHUP)])
def test_a_rank_keeps_an_ignored_hangup(kept: signal.Handlers, code: int) -> None:
    """A job below nohup survives the hangup of its terminal, and so do the processes of its ranks."""
    before = signal.signal(signal.SIGHUP, kept)
    try:
        process = RankProcess.start(["sh", "-c", "kill -HUP $$; echo here"], os.environ, rank=3, on_line=Heard())
    finally:
        signal.signal(signal.SIGHUP, before)
    assert process.wait_gone(LONG)
    assert process.exit is not None and process.exit.code == code


def test_tests_do_not_depend_on_the_signals_that_their_starter_ignores() -> None:
    ignoring = "trap '' HUP INT QUIT TERM USR1 USR2; exec \"$@\""
    name = f"{__file__}::test_no_input_and_the_default_signals"
    pytest_alone = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
    done = subprocess.run(["sh", "-c", ignoring, "sh", *pytest_alone], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr


def test_environment_is_exactly_the_one_given() -> None:
    heard = Heard()
    process = RankProcess.start(["/usr/bin/env"], {"LC_ALL": "C.UTF-8", "A": "é"}, rank=0, on_line=heard)
    assert process.wait_gone(LONG)
    family, *given = sorted((line for _, _, line in heard.lines), key=lambda line: "FAMILY" not in line)
    assert family.startswith("FARANDOLE_FAMILY=") and sorted(given) == ["A=é", "LC_ALL=C.UTF-8"]


def test_cores() -> None:
    heard = Heard()
    core = max(os.sched_getaffinity(0))
    with started(["grep", "Cpus_allowed_list", "/proc/self/status"], heard, cores=[core]) as process:
        assert process.wait(LONG)
    assert heard.lines[0][2].split() == ["Cpus_allowed_list:", str(core)]


def test_terminate_lets_the_rank_end_by_itself() -> None:
    heard = Heard()
    with started(["sh", "-c", "trap 'echo bye; exit 5' TERM; echo up; while :; do sleep 0.01; done"], heard) as process:
        assert heard.first.wait(20)
        process.terminate(LONG)
        exit = process.wait(LONG)
    assert exit is not None and exit.code == 5
    assert heard.lines[-1][2] == "bye"


def test_of_requests_that_arrive_together_the_shortest_grace_counts() -> None:
    """Ctrl-C twice, while the guard is busy."""
    guard = Guard.__new__(Guard)
    vars(guard).update(kill_at=None, rank_alive=False, asked_to_end=False)
    guard.control, launcher = os.pipe()
    os.write(launcher, b"T5000\nT0\n")
    guard.handle(guard.control)
    os.close(guard.control)
    os.close(launcher)
    assert guard.kill_at is not None and guard.kill_at <= time.monotonic()


def test_a_rank_that_does_not_listen_is_killed() -> None:
    heard = Heard()
    with started(["sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.01; done"], heard) as process:
        assert heard.first.wait(20)
        process.terminate(timedelta(milliseconds=50))
        exit = process.wait(LONG)
    assert exit is not None and exit.code == -signal.SIGKILL


def test_a_stopped_rank_is_ended_too() -> None:
    with started(["sh", "-c", "kill -STOP $$"], Heard()) as process:
        assert process.wait(timedelta(milliseconds=200)) is None
        process.terminate(LONG)
        exit = process.wait(LONG)
    assert exit is not None and exit.code == -signal.SIGTERM


# In the rank's group; in a session of its own; a daemon whose parent is gone; one that does not listen to SIGTERM.
FAMILY = """
sleep 1000 & echo $! > child
setsid sleep 1000 & echo $! > session
(setsid sh -c 'echo $$ > daemon; exec sleep 1000' &)
(trap '' TERM; sh -c 'echo $$ > deaf; exec sleep 1000') &
"""
MEMBERS = ["child", "session", "daemon", "deaf"]


@pytest.mark.parametrize("end", ["exit 0", "kill -KILL $$", "sleep 1000"])
def test_no_descendant_survives_the_rank(end: str, tmp_path: Path) -> None:
    script = f"cd {tmp_path}\n{FAMILY}\nwhile ! [ -e go ]; do sleep 0.01; done; {end}"
    with started(["sh", "-c", script], Heard()) as process, Watch(wait_for_files(tmp_path, MEMBERS)) as watch:
        (tmp_path / "go").touch()
        if end == "sleep 1000":
            process.terminate(timedelta(milliseconds=50))
        assert watch.survivors() == []


def test_descendants_are_found_where_the_kernel_lists_no_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks = """
def refuse(path, *more, there=open):
    if str(path).endswith("children"):
        raise FileNotFoundError(path)
    return there(path, *more)
builtins.open = refuse
"""
    monkeypatch.setattr(processes, "GUARD", older_system(tmp_path, lacks))
    script = f"cd {tmp_path}\n{FAMILY}\nsleep 1000"
    with started(["sh", "-c", script], Heard()) as process, Watch(wait_for_files(tmp_path, MEMBERS)) as watch:
        process.terminate(NO_TIME)
        assert watch.survivors() == []


# A child in a session of its own that holds the rank's output open, and one that nobody can read.
DETACHED = (
    "setsid sh -c 'echo $$ > detached; sleep 1000' & setsid sh -c 'echo $$ > silent; sleep 1000' > /dev/null 2>&1 &"
)


def test_detached_children_die_with_a_guard_that_is_killed(tmp_path: Path) -> None:
    script = f"cd {tmp_path}; {DETACHED} echo $$ > rank; echo $PPID > guard; wait"
    with started(["sh", "-c", script], Heard()) as process:
        detached, silent, rank, guard = wait_for_files(tmp_path, ["detached", "silent", "rank", "guard"])
        with Watch([detached, silent, rank]) as watch:
            began = time.monotonic()
            os.kill(guard, signal.SIGKILL)
            assert process.wait_gone(LONG)
            assert time.monotonic() - began < 10  # for a busy machine; 0.1 s alone
            assert watch.survivors(0.5) == []  # what it says is so


def test_a_guard_that_gives_up_leaves_the_rest_to_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the processes were stuck in the kernel; the launcher finds them, and names those that it cannot end."""
    text = Path(GUARD).read_text()
    for old, new in (("GIVE_UP = 10.0", "GIVE_UP = 0.05"), ("os.kill(pid, number)", "pass")):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "guard.py").write_text(text)
    monkeypatch.setattr(processes, "GUARD", str(tmp_path / "guard.py"))
    with started(["sh", "-c", f"cd {tmp_path}; {DETACHED} wait"], Heard()) as process:
        children = wait_for_files(tmp_path, ["detached", "silent"])
        with Watch(children) as watch:
            process.terminate(NO_TIME)
            assert process.wait_gone(LONG)
            assert watch.survivors(0.5) == []


def test_a_guard_that_is_stopped_is_noticed_and_its_rank_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = f"cd {tmp_path}; {DETACHED} echo $$ > rank; echo $PPID > guard; wait"
    with started(["sh", "-c", script], Heard()) as process:
        detached, silent, rank, guard = wait_for_files(tmp_path, ["detached", "silent", "rank", "guard"])
        with Watch([detached, silent, rank, guard]) as watch:
            began = time.monotonic()
            os.kill(guard, signal.SIGSTOP)
            process.terminate(timedelta(seconds=1))  # which the guard does not read
            exit = process.wait(LONG)
            assert time.monotonic() - began < 10  # for a busy machine; 2 s alone
            assert process.wait_gone(LONG)
            assert watch.survivors(0.5) == []
    assert exit is not None
    assert (exit.code, exit.reason) == (-signal.SIGKILL, "was killed because its guard process had been stopped")
    assert f"the guard of rank 3 (process {guard}) has been stopped" in caplog.text


def test_a_rank_that_is_stopped_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with started(["sh", "-c", f"cd {tmp_path}; echo $$ > rank; sleep 1000"], Heard()):
        (rank,) = wait_for_files(tmp_path, ["rank"])
        os.kill(rank, signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while "is stopped" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1.2)  # two looks more
    assert caplog.text.count(f"rank 3 (process {rank}) is stopped (SIGSTOP)") == 1


def test_the_rank_dies_with_its_guard(tmp_path: Path) -> None:
    script = f"cd {tmp_path}; sleep 1000 & echo $! > child; echo $$ > rank; echo $PPID > guard; wait"
    with started(["sh", "-c", script], Heard()) as process:
        child, rank, guard = wait_for_files(tmp_path, ["child", "rank", "guard"])
        with Watch([child, rank]) as watch:
            os.kill(guard, signal.SIGKILL)
            exit = process.wait(LONG)
            assert watch.survivors() == []
    assert exit is not None
    assert (exit.code, exit.reason) == (-signal.SIGKILL, "was killed together with its guard process")


def older_system(folder: Path, lacks: str) -> str:
    """A guard on a system that lacks something; gives its path."""
    script = folder / "guard.py"
    script.write_text(f"import builtins, os, runpy\n{lacks}\nrunpy.run_path({GUARD!r}, run_name='__main__')\n")
    return str(script)


@pytest.mark.parametrize("lacks", ["", "del os.pidfd_open"], ids=["pidfd", "no pidfd"])
def test_a_copy_of_the_launchers_descriptors_keeps_no_rank_alive(lacks: str, tmp_path: Path) -> None:
    # A fork of the launcher holds its end of every pipe; only the launcher's own death may count.
    program = f"""
import os, signal, time
from farandole.launch import processes
from farandole.launch.processes import RankProcess
processes.GUARD = {older_system(tmp_path, lacks)!r}
RankProcess.start(["sh", "-c", "cd {tmp_path}; echo $$ > rank; exec sleep 1000"], os.environ, rank=0, on_line=print)
while not os.path.exists("{tmp_path}/rank"):
    time.sleep(0.01)
fork = os.fork()
if fork == 0:
    time.sleep(1000)
with open("{tmp_path}/fork", "w") as file:
    print(fork, file=file)
time.sleep(1000)
"""
    with started([sys.executable, "-c", program], Heard()) as process:
        rank, fork = wait_for_files(tmp_path, ["rank", "fork"])
        with Watch([rank]) as rank_watch, Watch([fork]) as fork_watch:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            assert rank_watch.survivors() == []
            assert fork_watch.survivors() == []  # the outer guard's doing


def test_a_listener_that_fails_ends_the_rank() -> None:
    def refuse(rank: int, stream: str, line: str) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    process = RankProcess.start(["yes"], os.environ, rank=0, on_line=refuse)
    exit = process.wait(LONG)
    assert process.wait_gone(LONG)
    assert exit is not None
    assert exit.reason == "was ended because its output could not be written: [Errno 32] Broken pipe"


def test_many_from_a_thread_that_ends() -> None:
    # A parent-death signal of the starting thread would kill these.
    all_of_them: list[RankProcess] = []

    def start() -> None:
        for rank in range(4):
            all_of_them.append(RankProcess.start(["sleep", "0.3"], os.environ, rank=rank, on_line=Heard()))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    exits = [process.wait(LONG) for process in all_of_them]
    assert all(process.wait_gone(LONG) for process in all_of_them)
    assert [(each.rank, each.code) for each in exits if each] == [(rank, 0) for rank in range(4)]
