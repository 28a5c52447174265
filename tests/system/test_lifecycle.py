"""A context can begin and end at any time, and as often as one likes; nothing of it is left."""

import gc
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from farandole._native import Handle
from farandole.config import Config
from farandole.core import default
from farandole.core.context import Context
from farandole.core.operations.kinds import ALLREDUCE, BARRIER
from farandole.errors import EngineClosed, PeerLost
from farandole.meeting.rendezvous import SoloRendezvous, from_environment
from helpers.ranks import run_ranks
from helpers.recurring import recurring

LIVES = 100
SUM = 1
AT_ONCE = 30.0  # seconds: far from what anything waits for by default


def held() -> dict[str, int]:
    """How much this process holds of what a context could leak."""
    gc.collect()
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "segments": Path("/proc/self/maps").read_text().count("memfd:farandole"),
    }


def held_in_the_end(before: dict[str, int]) -> dict[str, int]:
    """What is held when there is no more of it than `before`, or after a moment."""
    deadline = time.monotonic() + 30
    while any(count > before[what] for what, count in held().items()) and time.monotonic() < deadline:
        time.sleep(0.02)  # the kernel ends a thread a moment after it was joined
    return held()


def lives_alone(outer: Context, lives: int) -> tuple[dict[str, int], dict[str, int]]:
    """What this process holds after its first life as the only rank, and after its last."""
    outer.shutdown()
    values = np.ones(1000, np.float32)

    def live(name: str) -> None:
        default.init(rendezvous=SoloRendezvous())
        default.init()
        default.context().engine.run(recurring(ALLREDUCE, op=SUM), name, values, values)
        default.shutdown()
        default.shutdown()

    def live_often() -> tuple[dict[str, int], dict[str, int]]:
        live("first")
        before = held()
        for life in range(lives):
            live(f"x{life % 3}")
        return before, held_in_the_end(before)

    with ThreadPoolExecutor(1) as pool:  # a thread in which nobody's context is in use
        return pool.submit(live_often).result(60)


def test_a_hundred_lives_alone_leave_nothing() -> None:
    # In a process of its own: what a Spark session of another test leaves to this one comes and goes as it likes.
    [(before, after)] = run_ranks(1, lives_alone, LIVES, how="processes")
    assert after == before


def lives_again_and_again(outer: Context, lives: int) -> tuple[dict[str, int], dict[str, int]]:
    """What this process holds after its first life among the others, and after its last."""
    outer.shutdown()
    values = np.ones(1000, np.float32)

    def live() -> None:
        with Context(from_environment(), Config(), host=f"host {outer.rank % 2}") as context:
            context.engine.run(recurring(ALLREDUCE, op=SUM), "x", values, values)

    live()
    before = held()
    for _ in range(lives - 1):
        live()
    return before, held_in_the_end(before)


@pytest.mark.parametrize("size", [2, 3])
def test_many_lives_among_others_leave_nothing(size: int) -> None:
    for before, after in run_ranks(size, lives_again_and_again, LIVES // 5, how="processes"):
        assert after == before


def is_refused(handle: Handle) -> None:
    with pytest.raises(EngineClosed, match="shut down"):
        handle.wait()


def leaves_with_work_pending(context: Context, leaver: int) -> str:
    values = np.ones(1000, np.float32)
    context.engine.run(recurring(BARRIER), "all are here", None, None)
    # The others never ask for these, nor do they ask for what the others want.

    def ask(i: int) -> Handle:
        return context.engine.start(recurring(ALLREDUCE), f"{context.rank}.{i}", values.copy(), values.copy())

    if context.rank == leaver:
        mine = [ask(i) for i in range(20)]
        waiting = threading.Thread(target=is_refused, args=(mine[-1],), name="waits")
        waiting.start()
        began = time.monotonic()
        context.shutdown()
        assert time.monotonic() - began < AT_ONCE
        waiting.join(60)
        assert not waiting.is_alive()
        for handle in mine:
            is_refused(handle)
        return "left"
    mine = []
    with suppress(PeerLost):  # the news may come between two questions, but must be the same to all
        mine.extend(ask(i) for i in range(20))
    for wait in (*(handle.wait for handle in mine), lambda: ask(20).wait()):
        with pytest.raises(PeerLost) as lost:
            wait()
        assert (lost.value.rank, lost.value.reason) == (leaver, "it has shut down")
    return "lost"


@pytest.mark.parametrize("how", ["threads", "processes"])
@pytest.mark.parametrize("leaver", [0, 1], ids=["coordinator", "other"])
def test_shutdown_ends_what_is_pending_here_and_there(how: str, leaver: int) -> None:
    results = run_ranks(3, leaves_with_work_pending, leaver, how=how)
    assert results == ["left" if rank == leaver else "lost" for rank in range(3)]


def run_script(text: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a program that ends by itself."""
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=seconds, check=False)


WARN = """
from farandole import _native
_native.set_leak_warnings(True)
"""

BEGIN = """
import numpy as np
from farandole.core import default
from farandole.core.operations.kinds import ALLREDUCE
from farandole.core.operations.request import Request
default.init()
values = np.ones(1 << 20, np.float32)
engine = default.context().engine
request = Request(ALLREDUCE, "x")
handle = engine.start(request, "x", values, values)
"""


@pytest.mark.parametrize(
    "end",
    [
        "",
        "handle.wait()",
        "import sys; sys.exit(0)",
        "import gc; keep = [handle, engine]; keep.append(keep)",  # destroyed when the interpreter is nearly gone
        "import threading; threading.Thread(target=handle.wait).start()",
        "import threading; threading.Thread(target=lambda: [engine.run(request, 'y', values, values) for _ in "
        "range(10**9)], daemon=True).start()",
    ],
    ids=["at once", "waited for", "sys.exit", "a cycle of references", "a thread that waits", "a daemon that works"],
)
def test_an_interpreter_ends_without_shutdown(end: str) -> None:
    done = run_script(WARN + BEGIN + end)
    assert done.returncode == 0, done.stderr
    if "daemon" not in end:  # such a thread is stopped where it is, and complains or keeps what it holds
        assert done.stderr == ""


@pytest.mark.parametrize("before", [WARN, ""], ids=["in tests", "in production"])
def test_objects_at_the_interpreters_end_are_reported_in_tests_only(before: str) -> None:
    # As a framework does with a process group that is never destroyed.
    leak = "import ctypes; ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle)); raise SystemExit('of the user')"
    done = run_script(before + BEGIN + leak)
    assert ("nanobind: leaked" in done.stderr) == bool(before)
    assert done.stderr.startswith("of the user\n")
