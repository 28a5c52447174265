"""Elastic jobs whose launcher is killed: the members that are there go on, elect one of them after a loss, and end."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from system.elastic_training import LINE, TRAINING, Survivors, Training, is_alive, training
from system.launched import PATIENCE

pytestmark = pytest.mark.native

SIZES = ("-np", "4", "--max-np", "4", "--survive-launcher")


def kill_launcher(job: Training) -> dict[int, int]:
    """Kill the launcher once all ranks train; return the processes of the members."""
    job.wait(lambda: 4 in job.sizes() and len(job.pids()) == 4, "the first steps")
    job.process.kill()
    job.process.wait()
    return {int(found[1]): int(found[5]) for found in LINE.finditer(job.output)}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    yield
    (tmp_path / "end").touch()  # for members that nobody else ends, after a failure


@pytest.mark.usefixtures("home")
def test_members_end_when_too_few_are_left(tmp_path: Path) -> None:
    with training(tmp_path, *SIZES, "--min-np", "3") as job:
        alive = kill_launcher(job)
        members = Survivors(job)
        step = members.wait(4, 0)
        os.kill(alive.pop(0), signal.SIGKILL)
        members.wait(3, step)
        os.kill(alive.pop(2), signal.SIGKILL)
        members.wait_ended(alive.values())
    assert "the launcher is lost, 2 ranks are left; 3 are needed (--min-np)" in members.output()


@pytest.mark.parametrize("lock", [False, True], ids=["stopped", "holds Python's lock"])
@pytest.mark.usefixtures("home")
def test_a_stuck_member_is_put_aside(tmp_path: Path, lock: bool) -> None:
    """No launcher asks after it any more; here it is the one that would lead the others."""
    hold = "if os.path.exists(f'hold {os.getpid()}'): __import__('ctypes').PyDLL(None).sleep(1000)"
    program = TRAINING.replace("        time.sleep(0.01)", f"        {hold}\n        time.sleep(0.01)")
    with training(tmp_path, *SIZES, "--min-np", "2", program=program) as job:
        alive = kill_launcher(job)
        members = Survivors(job)
        step, stuck = members.wait(4, 0), alive.pop(0)
        began = time.monotonic()
        if lock:
            (tmp_path / f"hold {stuck}").touch()
        else:
            os.kill(stuck, signal.SIGSTOP)
        members.wait(3, step)
        print(f"{time.monotonic() - began:.2f} s")
        assert not is_alive(stuck)
        (tmp_path / "end").touch()
        members.wait_ended(alive.values())
        assert {pid for _, _, pid in members.ends()} == set(alive.values())
    silences = re.findall("member 0 is lost: it gave no sign of life for ([0-9.]+) s", members.output())
    assert silences and min(map(float, silences)) >= (10 if lock else 1.4)


@pytest.mark.usefixtures("home")
def test_a_launcher_takes_a_job_over(tmp_path: Path) -> None:
    """The members go on in their processes; the new launcher shows their lines, and replaces lost ranks again."""
    with training(tmp_path, *SIZES, "--min-np", "2") as job:
        alive = kill_launcher(job)
        members = Survivors(job)
        step = members.wait(4, 0)
        os.kill(alive.pop(3), signal.SIGKILL)  # they meet without a launcher
        members.wait(3, step)
        (record,) = (tmp_path / "home").glob(".local/state/farandole/*/launcher")
        assert record.stat().st_mode & 0o077 == 0
        with training(tmp_path, *SIZES, "--min-np", "2", "--join", "last") as joined:
            joined.wait(lambda: 4 in joined.sizes(), "a new rank has come")
            since = len(joined.output)
            joined.wait(lambda: len(joined.pids(since)) == 4, "all ranks train")
            assert alive.items() <= joined.pids(since).items()
            os.kill(alive.pop(0), signal.SIGKILL)
            since = len(joined.output)
            joined.wait(lambda: 4 in joined.sizes(since), "an adopted rank is replaced")
            assert set(alive.values()) <= set(joined.finish())
        assert not record.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("home")
def test_a_launcher_that_takes_over_ends_a_member_that_is_stopped(tmp_path: Path) -> None:
    """It cannot call, and would stay for ever."""
    with training(tmp_path, *SIZES, "--min-np", "2") as job:
        alive = kill_launcher(job)
        stopped = alive.pop(1)
        os.kill(stopped, signal.SIGSTOP)
        with training(tmp_path, *SIZES, "--min-np", "2", "--join", "last") as joined:
            joined.wait(lambda: 4 in joined.sizes(), "it is replaced")
            assert not is_alive(stopped)
            assert set(alive.values()) <= set(joined.finish())


@pytest.mark.usefixtures("home")
def test_a_launcher_takes_over_a_training_that_has_just_ended(tmp_path: Path) -> None:
    with training(tmp_path, *SIZES, "--min-np", "2") as job:
        alive = kill_launcher(job)
        members = Survivors(job)
        members.wait(4, 0)
        (tmp_path / "end").touch()
        members.wait_ended(alive.values())
        with training(tmp_path, *SIZES, "--min-np", "2", "--join", "last") as joined:
            assert joined.process.wait(PATIENCE) == 0
        assert not list((tmp_path / "home").glob(".local/state/farandole/*/*[lr.]en*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.usefixtures("home")
def test_a_launcher_that_is_told_to_end_ends_its_members(tmp_path: Path, number: signal.Signals) -> None:
    with training(tmp_path, *SIZES, "--min-np", "1") as job:
        job.wait(lambda: len(job.pids()) == 4, "the first steps")
        job.process.send_signal(number)
        assert job.process.wait(PATIENCE) in (128 + number, 130)
        assert not any(map(is_alive, job.pids().values()))
    assert not list((tmp_path / "home").glob(".local/state/farandole/*"))
