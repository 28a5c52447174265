"""A child that a rank forks cannot use the rank's engine, hears so at once, and disturbs nobody when it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from farandole.config import Config
from farandole.core import default
from farandole.core.context import Context
from farandole.core.operations.kinds import ALLREDUCE
from farandole.errors import InvalidRequest, PeerLost
from farandole.meeting.rendezvous import SoloRendezvous, from_environment
from helpers.deaths import wait_for_others
from helpers.ranks import run_ranks
from helpers.recurring import recurring

SUM = 1


def in_a_child(body: Callable[[], object]) -> int:
    """Run `body` in a forked child; its exit status."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a child that hangs dies
        try:
            body()
        except BaseException as error:
            os.write(2, f"in the forked child: {error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def forks(outer: Context, hosts: int) -> tuple[int, float]:
    """Fork with work in flight; the child is refused, leaves, and the ranks go on as if nothing had been."""
    outer.shutdown()
    values = np.ones(1000, np.float32)
    with Context(from_environment(), Config(), host=f"host {outer.rank % hosts}") as context, default.use(context):
        pending = context.engine.start(recurring(ALLREDUCE, op=SUM), "in flight", values, values)

        def use_the_engine() -> None:
            assert default.rank() == outer.rank  # to know one's place takes no engine
            for use in (context.engine.run, context.engine.start):
                with pytest.raises(InvalidRequest, match="'mine': this process was forked from a rank"):
                    use(recurring(ALLREDUCE, op=SUM), "mine", values, values)
            if not pending.done():
                with pytest.raises(InvalidRequest, match="forked"):
                    pending.wait()
            context.shutdown()

        status = in_a_child(use_the_engine)
        pending.wait()
        for step in range(50):
            context.engine.run(recurring(ALLREDUCE, op=SUM), f"x{step % 2}", values, values)
        return status, float(values[0])


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_forked_child_is_refused_and_disturbs_nobody(hosts: int) -> None:
    results = run_ranks(2, forks, hosts, how="processes")
    assert results == [(0, 2.0**51)] * 2


def refuses(call: Callable[[], None]) -> None:
    with pytest.raises(InvalidRequest, match=r"timeline.*forked from rank 0"):
        call()


def test_a_child_does_not_write_into_the_timeline(tmp_path: Path) -> None:
    path, values = tmp_path / "timeline.json", np.ones(10, np.float32)
    with Context(SoloRendezvous(), Config(timeline=str(path))) as context:
        context.engine.run(recurring(ALLREDUCE, op=SUM), "before", values, values)
        for refused in (context.timeline.stop, lambda: context.timeline.start(tmp_path / "other.json")):
            assert in_a_child(lambda call=refused: refuses(call)) == 0
        assert in_a_child(context.shutdown) == 0
        context.engine.run(recurring(ALLREDUCE, op=SUM), "after", values, values)
    events = json.loads(path.read_text())
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["before", "after"]


ALONE = """
import os, sys
import numpy as np
from farandole.core import default
from farandole.core.operations.kinds import ALLREDUCE
from farandole.core.operations.request import Request
default.init()
values = np.ones(1 << 20, np.float32)
engine = default.context().engine
request = Request(ALLREDUCE, "x")
handle = engine.start(request, "x", values, values)
child = os.fork()
if child == 0:
    try:
        engine.run(request, "y", values, values)
    except ValueError as error:
        sys.exit(0 if "forked" in str(error) else str(error))
    sys.exit("the child was not refused")
handle.wait()
engine.run(request, "y", values, values)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_interpreter_ends_as_usual() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def dies_with_a_child(outer: Context, folder: Path) -> tuple[int, float]:
    """Return who was lost, and how long that took; rank 1 is killed, and leaves a child that sleeps."""
    outer.shutdown()
    # The end of its connections is to tell of its death, not its silence.
    config = Config(heartbeat=timedelta(seconds=60))
    with Context(from_environment(), config, host=f"host {outer.rank}") as context:
        values = np.ones(1000, np.float32)
        for step in range(50):
            context.engine.run(recurring(ALLREDUCE, op=SUM), f"x{step % 2}", values, values)
        wait_for_others(context, 1, folder)
        if context.rank == 1:
            if os.fork() == 0:
                os.close(int(sys.argv[1]))  # the connection to the test, which waits for its end
                signal.alarm(60)
                signal.pause()
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(PeerLost) as error:
            context.engine.run(recurring(ALLREDUCE, op=SUM), "x0", values, values)
        return error.value.rank, time.monotonic() - began


def test_a_death_is_noticed_though_a_child_lives(tmp_path: Path) -> None:
    (lost, seconds), _ = run_ranks(2, dies_with_a_child, tmp_path, how="processes", dies=[1])
    assert lost == 1
    assert seconds < 10  # a moment, but the machine may be busy
