"""What `farandole check` says of programs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.compat.check import find_uses, run_check

HOROVOD = """
import os
import horovod.torch as hvd
from horovod.tensorflow.keras import callbacks
from horovod.spark.task import task_exec

os.environ["HOROVOD_CYCLE_TIME"] = "2"
hvd.init()
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
hvd.allreduce(tensor, op=hvd.Adasum, colour=1)
hvd.nccl_built()
callbacks.MetricAverageCallback()
hvd.no_such_name()
"""
TORCH = """
import os
import torch.distributed as dist

os.environ["MASTER_ADDR"]
dist.init_process_group("gloo")
dist.split_group()
"""
SHELL = """
export HOROVOD_FUSION_THRESHOLD=1 HOROVOD_NO_SUCH=1
horovodrun -np 4 --cycle-time-ms 3 \\
  --jsrun python train.py --jsrun
"""


def states(text: str, *, is_python: bool = True) -> list[tuple[int, str, str]]:
    return [(use.line, use.what, use.finding.state) for use in find_uses(text, is_python=is_python)]


def test_names_arguments_and_variables() -> None:
    assert states(HOROVOD) == [
        (3, "horovod.torch", "yes"),
        (4, "horovod.tensorflow.keras.callbacks", "yes"),
        (5, "horovod.spark.task.task_exec", "no"),
        (7, "HOROVOD_CYCLE_TIME", "ignored"),
        (8, "horovod.torch.init", "better"),
        (9, "OMPI_COMM_WORLD_RANK", "differs"),
        (10, "horovod.torch.allreduce(colour=)", "unknown"),
        (10, "horovod.torch.allreduce", "better"),
        (10, "horovod.torch.Adasum", "better"),
        (11, "horovod.torch.nccl_built", "differs"),
        (12, "horovod.tensorflow.keras.callbacks.MetricAverageCallback", "better"),
        (13, "horovod.torch.no_such_name", "unknown"),
    ]


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("horovod.run(f, use_gloo=True, verbose=None)", ["horovod.run(use_gloo=): ignored", "horovod.run: better"]),
        ("horovod.spark.run(f, use_mpi=True)", ["horovod.spark.run(use_mpi=): no", "horovod.spark.run: better"]),
    ],
)
def test_arguments_with_an_answer_of_their_own(call: str, found: list[str]) -> None:
    uses = find_uses(f"import horovod.spark\n{call}\n")
    assert [f"{use.what}: {use.finding.state}" for use in uses if use.line == 2] == found


def test_attributes_of_every_module_are_known() -> None:
    assert states("import horovod\nhorovod.__file__, horovod.__files__\n") == [
        (1, "horovod", "yes"),
        (2, "horovod.__file__", "yes"),
        (2, "horovod.__files__", "unknown"),
    ]


def test_torch_over_gloo() -> None:
    found = [each for each in states(TORCH) if each[2] != "yes" or "." not in each[1]]
    assert found == [
        (5, "MASTER_ADDR", "yes"),
        (6, "backend 'gloo'", "yes"),
        (7, "torch.distributed.split_group", "no"),
    ]


def test_a_script_of_a_shell() -> None:
    assert states(SHELL, is_python=False) == [
        (2, "HOROVOD_FUSION_THRESHOLD", "yes"),
        (2, "HOROVOD_NO_SUCH", "unknown"),
        (3, "horovodrun -np", "yes"),
        (3, "horovodrun --cycle-time-ms", "ignored"),
        (3, "horovodrun --jsrun", "no"),
    ]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, broken = tmp_path / "good.py", tmp_path / "bad.py", tmp_path / "broken.py"
    good.write_text("import horovod.torch as hvd\nhvd.init()\nhvd.size()\n")
    bad.write_text(HOROVOD)
    broken.write_text("import (")
    assert run_check([str(good)]) == 0
    first, total = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{good}:2: horovod.torch.init: better; a failure names the ranks")
    assert total == f"{good}: 2 yes, 1 better"
    assert run_check(["--all", str(good)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert run_check([str(good), str(bad)]) == 1
    assert "task_exec: no; ranks are the tasks of a barrier stage" in capsys.readouterr().out
    assert run_check([str(broken)]) == 2


NOTEBOOK = {
    "cells": [
        {"cell_type": "markdown", "source": ["import horovod"]},
        {"cell_type": "code", "source": ["%pip install horovod\n", "import horovod.torch as hvd\n"]},
        {"cell_type": "code", "source": ["if True:\n", "    !ls\n", "hvd.no_such()"]},
    ]
}


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("latin.py", "# coding: latin-1\nimport horovod.torch as hvd\nhvd.no_such('é')".encode("latin-1")),
        ("train", b"#!/usr/bin/env python3\nimport horovod.torch as hvd\nhvd.no_such()"),
        ("notebook.ipynb", json.dumps(NOTEBOOK).encode()),
    ],
)
def test_programs_that_do_not_look_like_one(
    tmp_path: Path, name: str, code: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(code)
    assert run_check([str(tmp_path / name)]) == 0
    assert "horovod.torch.no_such: unknown" in capsys.readouterr().out


@pytest.mark.parametrize(
    "code",
    [
        {"worksheets": [{"cells": [{"cell_type": "code", "input": ["import horovod.torch as hvd"]}]}]},
        {"cells": [{"cell_type": "code", "source": 1}]},
        {"cells": 1},
        [],
    ],
)
def test_an_older_notebook_is_not_taken_for_one_without_code(
    tmp_path: Path, code: object, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.ipynb").write_text(json.dumps(code))
    assert run_check([str(tmp_path / "old.ipynb")]) == 2
    assert "no notebook of format 4; convert an older one by: jupyter nbconvert" in capsys.readouterr().err


def test_no_framework_is_imported(tmp_path: Path) -> None:
    (tmp_path / "prog.py").write_text(HOROVOD)
    heavy = "{'numpy', 'torch', 'tensorflow', 'pyspark'}"
    program = "import sys; from farandole.launch import cli; cli.main(['check', 'prog.py']); "
    program += f"print({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout.splitlines()[-1], done.stderr) == ("set()", "")
