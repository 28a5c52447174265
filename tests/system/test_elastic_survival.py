"""Elastic jobs whose launcher is killed: the members that are there go on, elect one of them after a loss, and end."""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from system.elastic_training import LINE, Survivors, Training, expected_weight, is_alive, training
from system.launched import PATIENCE

pytestmark = pytest.mark.native

SEED = int(os.environ.get("ELASTIC_SEED", "0")) or random.SystemRandom().randrange(1 << 30)
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
def test_members_outlive_launcher_and_ranks(tmp_path: Path) -> None:
    print(f"ELASTIC_SEED={SEED}")
    dice = random.Random(SEED)
    with training(tmp_path, *SIZES, "--min-np", "1") as job:
        alive = kill_launcher(job)
        members, step = Survivors(job), 0
        while len(alive) > 1:
            step = members.wait(len(alive), step)
            for victim in dice.sample(sorted(alive), dice.randint(1, len(alive) - 1)):
                os.kill(alive.pop(victim), dice.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM]))
        members.wait(1, step)
        members.finish(set(alive.values()))


@pytest.mark.usefixtures("home")
def test_launcher_and_rank_are_lost_together(tmp_path: Path) -> None:
    print(f"ELASTIC_SEED={SEED}")
    dice = random.Random(SEED)
    with training(tmp_path, *SIZES, "--min-np", "1") as job:
        job.wait(lambda: 4 in job.sizes() and len(job.pids()) == 4, "the first steps")
        alive = job.pids()
        lost = alive.pop(dice.choice(sorted(alive)))
        orders = [job.process.kill, lambda: os.kill(lost, signal.SIGKILL)]
        dice.shuffle(orders)
        orders[0]()
        # Perhaps the lost rank's successor has started meanwhile, or has got its place.
        time.sleep(dice.choice([0.0, 0.01, 0.2, 0.5, 1.0]))
        orders[1]()
        job.process.wait()
        members = Survivors(job)
        before = members.steps()
        deadline = time.monotonic() + PATIENCE
        while any(members.steps()[pid] < before[pid] + 10 for pid in alive.values()):
            assert time.monotonic() < deadline, members.output()[-2000:]
            time.sleep(0.02)
        (tmp_path / "end").touch()
        members.wait_ended(alive.values())
        ends = members.ends()
    assert {pid for _, _, pid in ends} >= set(alive.values()), members.output()[-2000:]
    assert {weight for _, weight, _ in ends} == {expected_weight(ends[0][0])}


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.usefixtures("home")
def test_a_launcher_that_is_told_to_end_ends_its_members(tmp_path: Path, number: signal.Signals) -> None:
    with training(tmp_path, *SIZES, "--min-np", "1") as job:
        job.wait(lambda: len(job.pids()) == 4, "the first steps")
        job.process.send_signal(number)
        assert job.process.wait(PATIENCE) in (128 + number, 130)
        assert not any(map(is_alive, job.pids().values()))
    assert not list((tmp_path / "home").glob(".local/state/farandole/*"))
