"""The sales example as Flyte workflows: serialized tasks, and whole workflows on this machine."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.flyte import custom_of, loop
from helpers.installed import require

require("flytekitplugins", "pyspark", "keras", "tensorflow", "matplotlib")

pytestmark = pytest.mark.native

PROGRAM = Path(__file__).parents[3] / "examples" / "rossmann" / "workflow.py"
event_loop = pytest.fixture(scope="module", autouse=True)(loop)


@pytest.fixture(scope="module")
def tasks() -> Any:
    """Return the example's module; the imports that it answers end with the test."""
    from rossmann import workflow

    from farandole.compat import uninstall

    yield workflow
    uninstall()


def test_tasks_serialize_as_the_plug_ins_have_it(tasks: Any) -> None:
    from flytekit.tools.translator import get_serializable

    from helpers.flyte import settings

    spark = {
        "sparkConf": tasks.SPARK_CONF,
        "mainApplicationFile": "local:///opt/venv/bin/entrypoint.py",
        "executorPath": "/opt/venv/bin/python",
        "databricksConf": {},  # the application's type, Python, is the message's default
    }
    types = {"horovod_spark_task": ("spark", 0), "engineer_features": ("spark", 0), "train_on_ranks": ("mpi", 1)}
    for name, kind in types.items():
        template: Any = get_serializable({}, settings(), getattr(tasks, name)).template
        assert (template.type, template.task_type_version) == kind
    for task in (tasks.horovod_spark_task, tasks.engineer_features):
        assert custom_of(task) == spark
    assert custom_of(tasks.train_on_ranks) == {
        "launcherReplicas": {"replicas": 1, "resources": {}},
        "workerReplicas": {
            "replicas": 2,
            "resources": {"requests": [{"name": "CPU", "value": "1"}, {"name": "MEMORY", "value": "1Gi"}]},
        },
        "slots": 1,
    }


@pytest.mark.spark
@pytest.mark.skipif(
    os.environ.get("FARANDOLE_TEST_WAYS") != "both", reason="two minutes: FARANDOLE_TEST_WAYS=both asks for it"
)
@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", ["one", "two"])
def test_the_workflow_forecasts(tmp_path: Path, way: str) -> None:
    command = [sys.executable, str(PROGRAM), "--rows", "2000", "--epochs", "2", "--out", str(tmp_path), "--way", way]
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    if way == "two":
        found = re.search(r"two tasks: RMSPE (\d\.\d{4}); (.*)$", done.stdout, re.MULTILINE)
        assert found is not None, done.stdout
        assert float(found[1]) < 1.0 and Path(found[2]).stat().st_size > 0
        # The features were written once, by Spark, and no rank has a copy.
        assert len({path.parent for path in tmp_path.rglob("*.parquet")}) == 2
        return
    found = re.search(r"one task: ({.*}); (.*)$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    errors = json.loads(found[1].replace("'", '"'))
    assert 0.0 < errors["rmspe"] < 1.0
    out = Path(found[2])
    assert {each.name for each in out.iterdir()} == {
        *("model.keras", "submission.csv", "rmspe.json", "stdout.txt", "stderr.txt")
    }
    assert re.search(r"^\w{3} \w{3} .*\[0\] ", (out / "stderr.txt").read_text(), re.MULTILINE)
    assert list(tmp_path.rglob("runs/*/best.keras"))
