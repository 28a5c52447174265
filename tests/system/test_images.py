"""The images of deploy/, built without a container engine, and the commands that run in their containers."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from images import Image, build, problem

from helpers.flyte import IGNORED_FOLDERS, loop
from helpers.flyte_pods import Attempt
from helpers.installed import require
from helpers.kubernetes_api import Cluster, Pod, serve
from helpers.mpi_operator import TrainingOperator

require("flytekitplugins")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings(IGNORED_FOLDERS),
    pytest.mark.skipif(
        "FARANDOLE_TEST_IMAGES" not in os.environ, reason="an hour: FARANDOLE_TEST_IMAGES=1 asks for it"
    ),
    pytest.mark.skipif(bool(problem()), reason=problem() or "images"),
]
event_loop = pytest.fixture(scope="module", autouse=True)(loop)

IMPORTS = "import farandole, farandole.data, farandole.numpy, farandole.torch, farandole.integrations.flyte"
# What a user puts on top of the image: modules in its working folder.
PROGRAM = """
from flytekit import task
from flytekit.core.base_task import IgnoreOutputs
from flytekitplugins.kfmpi import HorovodJob, Launcher, MPIJob, Worker
from flytekitplugins.spark import Spark
from farandole.integrations.flyte import Farandole

def total(hvd) -> list[int]:
    import numpy as np
    hvd.init()
    found = hvd.allreduce(np.array([hvd.rank() + 1]), op=hvd.Sum)
    rank, size = hvd.rank(), hvd.size()
    hvd.shutdown()
    if rank:
        raise IgnoreOutputs("only rank 0 has outputs")
    return [int(found[0]), size]

@task(task_config=Farandole(num_workers=2, slots=2))
def ours() -> list[int]:
    import farandole.numpy as hvd
    return total(hvd)

@task(task_config=MPIJob(launcher=Launcher(replicas=1), worker=Worker(replicas=2), slots=2))
def mpi() -> list[int]:
    import farandole.numpy as hvd
    return total(hvd)

@task(task_config=HorovodJob(launcher=Launcher(replicas=1), worker=Worker(replicas=2), slots=2))
def horovod() -> list[int]:
    import torch
    import horovod.torch as hvd
    hvd.init()
    found = hvd.allreduce(torch.tensor([hvd.rank() + 1]), op=hvd.Sum)
    if hvd.rank():
        raise IgnoreOutputs("only rank 0 has outputs")
    return [int(found[0]), hvd.size()]

@task(task_config=Spark(spark_conf={}))
def spark() -> list[int]:
    from farandole.spark import HorovodRunner

    def reduce() -> list[int]:
        import numpy as np
        import farandole.numpy as hvd
        hvd.init()
        return [int(hvd.allreduce(np.array([hvd.rank() + 1]), op=hvd.Sum)[0]), hvd.size()]

    return HorovodRunner(np=2, driver_log_verbosity="all").run(reduce)
"""


@pytest.fixture(scope="module")
def train() -> Image:
    return build("", {"FRAMEWORK": "torch,flyte"})


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of tasks, as the one who registers them has it."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    import program

    yield program
    del sys.modules["program"]


def run(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def test_ranks_run_in_the_image_as_its_user(train: Image, tmp_path: Path) -> None:
    assert run(train.words(tmp_path / "a", ["id", "-u"])) == "1000\n"
    words = train.words(tmp_path / "b", ["farandole", "doctor"])
    _, _, problems = subprocess.run(words, capture_output=True, text=True, timeout=900).stdout.partition("problems\n")
    # Flyte's extra brings PySpark. Tasks of Spark have an image of their own, with Java.
    assert [line.split(":")[1] for line in problems.splitlines()] == [" Java"]
    run(train.words(tmp_path / "c", ["python", "-c", IMPORTS]))
    lines = run(train.words(tmp_path / "d", ["farandole", "run", "-np", "2", "python", "train.py"])).splitlines()
    assert sorted(lines) == [f"[{rank}] rank {rank} of 2: the ranks add up to 1" for rank in range(2)]


@pytest.mark.parametrize("name", ["ours", "mpi", "horovod"])
def test_the_command_of_a_flyte_task_runs_in_the_image(train: Image, tmp_path: Path, program: Any, name: str) -> None:
    """The words are those that Flyte puts into the launcher's pod, but for the name of its network interface."""
    folder = shared(tmp_path)
    attempt, operator = Attempt(folder), TrainingOperator(folder / "mpi", slots=2)
    operator.write(2)
    operator.folder.chmod(0o777)
    words = ["lo" if word == "eth0" else word for word in attempt.command(getattr(program, name), {})]
    env = {**operator.variables(), "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"}
    mounts = {"/home/mpiuser/program.py": str(tmp_path / "program.py"), "/etc/mpi": str(operator.folder)}
    said = run(train.words(tmp_path / "container", words, env=env, mounts=mounts, shared=[folder]))
    assert attempt.outcome() == ({"o0": [10, 4]}, "", False), said


def test_a_flyte_task_of_spark_runs_in_a_driver_and_executors(tmp_path: Path, program: Any) -> None:
    """Spark's operator starts the driver; that asks Kubernetes for two executors, each of which runs a rank."""
    image, folder = build("spark"), shared(tmp_path)
    attempt, modules = Attempt(folder), {"/opt/spark/work-dir/program.py": str(tmp_path / "program.py")}

    def start(pod: Pod) -> "subprocess.Popen[str]":
        assert pod.image == "registry/spark:1"
        mounts = dict(modules)
        for number, (target, files) in enumerate(pod.mounts.items()):
            mounts[target] = str(tmp_path / f"{pod.name}-{number}")
            Path(mounts[target]).mkdir()
            for name, content in files.items():
                Path(mounts[target], name).write_text(content)
        local = pod.env["SPARK_LOCAL_DIRS"]
        words = image.words(
            tmp_path / pod.name, [*image.entrypoint, *pod.words], env=pod.env, mounts=mounts,
            set_up=f'mkdir -p "$1/root{local}"\nchmod 777 "$1/root{local}"',
        )  # fmt: skip
        with (tmp_path / f"{pod.name}.log").open("w") as log:
            return subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, text=True)

    cluster = Cluster(start)
    with serve(cluster) as url:
        (tmp_path / "conf").mkdir()
        settings = {
            "spark.master": f"k8s://{url}", "spark.driver.host": "127.0.0.1", "spark.executor.instances": "2",
            "spark.executor.cores": "1", "spark.executor.memory": "512m",
            "spark.kubernetes.container.image": "registry/spark:1", "spark.kubernetes.namespace": "sales",
            "spark.kubernetes.executor.enableApiWatcher": "false",
            "spark.kubernetes.executor.apiPollingInterval": "1s",
        }  # fmt: skip
        lines = [f"{name}={value}\n" for name, value in settings.items()]
        (tmp_path / "conf" / "spark.properties").write_text("".join(lines))
        words = [*image.entrypoint, "driver", "--properties-file", "/opt/spark/conf/spark.properties"]
        words += ["--class", "org.apache.spark.deploy.PythonRunner", "local:///opt/venv/bin/entrypoint.py"]
        words += attempt.command(program.spark, {})
        env = {"SPARK_DRIVER_BIND_ADDRESS": "127.0.0.1", "FLYTE_INTERNAL_EXECUTION_ID": "e1"}
        mounts = {**modules, "/opt/spark/conf": str(tmp_path / "conf")}
        said = run(image.words(tmp_path / "driver", words, env=env, mounts=mounts, shared=[folder]))
    assert attempt.outcome() == ({"o0": [3, 2]}, "", False), said
    logs = [(tmp_path / f"{name}.log").read_text() for name in cluster.pods]
    assert len(logs) == 2 and all("Finished task" in each for each in logs), logs
