"""What a launcher leaves for its successor, and members that the successor follows."""

import os
import queue
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from farandole.errors import ConfigError
from farandole.launch.elastic.joining import Adopted, Record
from farandole.launch.failures import Failure


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


def test_a_record_is_private_and_is_found_again() -> None:
    old, new = Record(), Record(addresses={"127.0.0.1": 77}, members={3: ("a", 0), 12: ("user@b", 1)})
    old.write()
    new.write()
    os.utime(new._file, (0, 0))  # files of one moment would have no order
    assert new._file.stat().st_mode & 0o777 == 0o600 and new._file.parent.stat().st_mode & 0o777 == 0o700
    assert Record.find(new.name) == new
    assert Record.find("last") == old
    assert new.secret.hex() not in repr(new)
    old.remove()
    new.remove()
    assert not list(new._file.parents[1].iterdir())
    with pytest.raises(ConfigError, match="no job 'last' has lost its launcher here"):
        Record.find("last")


def test_a_home_that_cannot_hold_the_record_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"job's folder cannot be written: .*/file/.*; set HOME"):
        Record().write()
    Record().remove()  # the job ends with the error above


@pytest.mark.parametrize("well", [True, False])
def test_an_adopted_member_shows_its_lines_and_its_end(tmp_path: Path, well: bool) -> None:
    log, said = tmp_path / "log", queue.SimpleQueue[tuple[int, str, str]]()
    log.write_text("seen before\n")
    ended: queue.SimpleQueue[Failure | None] = queue.SimpleQueue()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) as process:
        member = Adopted(
            4, process.pid, str(log), lambda *line: said.put(line), lambda number, failure: ended.put(failure), list
        )
        with log.open("a") as file:
            file.write("a line\n")
        assert said.get(timeout=30) == (4, "stdout", "a line")
        assert not member.wait_gone(timedelta(0))
        member.leave(well)
        member.terminate(timedelta(seconds=20))
        failure = ended.get(timeout=30)
        assert (failure is None) == well
        assert member.wait_gone(timedelta(seconds=20))
        member.terminate(timedelta(0))
