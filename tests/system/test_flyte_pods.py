"""Flyte tasks in pods of the training operator that are lost and started again."""

import subprocess
import sys
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pytest

from helpers.flyte import IGNORED_FOLDERS, loop
from helpers.flyte_pods import Attempt
from helpers.installed import require
from helpers.marked import processes_with, running, wait_for_ranks
from helpers.mpi_operator import TrainingOperator

require("flytekitplugins")

pytestmark = [pytest.mark.native, pytest.mark.slow, pytest.mark.filterwarnings(IGNORED_FOLDERS)]
event_loop = pytest.fixture(scope="module", autouse=True)(loop)

TESTS = Path(__file__).parents[1]


def launcher(
    operator: TrainingOperator, attempt: Attempt, mark: str
) -> AbstractContextManager["subprocess.Popen[str]"]:
    """Run the launcher's container."""
    from helpers.flyte_tasks import interrupted

    words = attempt.command(interrupted, {"folder": str(attempt.folder)})
    words[0] = str(Path(sys.executable).with_name(words[0]))
    return running(words, {**operator.variables(), "PYTHONPATH": str(TESTS)}, mark, stderr=subprocess.STDOUT)


def secret_of(mark: str) -> str:
    """Return the job's secret, which only the environment of its ranks holds."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has just ended
            variables = dict(each.partition("=")[::2] for each in entry.read_text(errors="replace").split("\0"))
            if variables.get("MARK") == mark and variables.get("FARANDOLE_SECRET"):
                found.add(variables["FARANDOLE_SECRET"])
    (secret,) = found
    return secret


@pytest.fixture
def operator(tmp_path: Path) -> TrainingOperator:
    operator = TrainingOperator(tmp_path / "etc-mpi")
    operator.write(2)
    return operator


@pytest.mark.timeout(400)
def test_pods_that_are_restarted_go_on_from_the_checkpoint(
    operator: TrainingOperator, tmp_path: Path, mark: str
) -> None:
    """The launcher's pod runs its command again, for Flyte the same attempt; a worker's pod costs the attempt."""
    first, second = Attempt(tmp_path), Attempt(tmp_path, 1)
    with launcher(operator, first, mark) as process:
        wait_for_ranks(process, tmp_path, 2)
        secret = secret_of(mark)
        assert not any(secret in line for line in processes_with(mark))
        process.kill()
        said = process.communicate(timeout=120)[0]
    assert secret not in said
    with launcher(operator, first, mark) as process:
        wait_for_ranks(process, tmp_path, 2)
        operator.kill(1)
        said = process.communicate(timeout=120)[0]
    outputs, message, again = first.outcome()
    assert (outputs, again) == ({}, True), said
    assert "job-worker-1" in message
    operator.write(2, running=1)
    with launcher(operator, second, mark) as process:
        time.sleep(2.0)  # the pod of worker 1 is not there yet
        assert process.poll() is None
        operator.write(2)
        said = process.communicate(timeout=120)[0]
    files = [each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()]
    assert len(files) > 5 and not any(secret.encode() in each or bytes.fromhex(secret) in each for each in files)
    assert second.outcome() == ({"o0": [0, 101, 202, 203]}, "", False), said
