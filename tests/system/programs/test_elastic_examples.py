"""Elastic programs with the structure of Horovod's examples, under `horovodrun`, with `import horovod`: one rank more
comes while they train, then one is killed and replaced."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from helpers.installed import require
from system.elastic_training import training

PROGRAMS = Path(__file__).parents[2] / "data" / "elastic_examples"
HOROVODRUN = [sys.executable, "-m", "farandole.compat.horovodrun"]

ALWAYS = "pytorch_imagenet_resnet50_elastic"
ON_DEMAND = pytest.mark.skipif(
    "FARANDOLE_TEST_ELASTIC" not in os.environ, reason="a minute: FARANDOLE_TEST_ELASTIC=1 asks for it"
)

pytestmark = [pytest.mark.native, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    "name",
    [
        each.stem if each.stem == ALWAYS else pytest.param(each.stem, marks=ON_DEMAND)
        for each in sorted(PROGRAMS.glob("*_elastic.py"))
    ],
)
def test_example(tmp_path: Path, name: str) -> None:
    program = PROGRAMS / f"{name}.py"
    require(*(["torch"] if name.startswith("pytorch") else ["tensorflow", "keras"]))
    shutil.copy(PROGRAMS / "common.py", tmp_path)
    script = tmp_path / "hosts.sh"

    def offer(slots: int) -> None:
        (tmp_path / "new").write_text(f"#!/bin/sh\necho localhost:{slots}\n")
        (tmp_path / "new").chmod(0o755)
        (tmp_path / "new").rename(script)

    offer(2)
    options = ("-np", "2", "--min-np", "2", "--max-np", "4", "--host-discovery-script", str(script))
    with training(tmp_path, *options, program=program.read_text(), run=HOROVODRUN) as job:
        job.wait(lambda: len(job.pids()) == 2, "two ranks train", 150.0)
        before = job.pids()
        offer(3)
        job.wait(lambda: 3 in job.sizes(), "a third one has come", 150.0)
        since = len(job.output)
        job.wait(lambda: len(job.pids(since)) == 3, "all of them train", 150.0)
        assert before.items() <= job.pids(since).items()
        os.kill(before[0], signal.SIGKILL)
        since = len(job.output)
        job.wait(lambda: 2 in job.sizes(since) and 3 in job.sizes(since), "the lost rank is replaced", 150.0)
        assert before[1] in job.finish()
