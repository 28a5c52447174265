"""Flyte tasks of type `Farandole`: the serialized task, and local executions on real ranks."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("flytekitplugins.kfmpi")

from flytekit import Resources, current_context, task, workflow
from flytekit.core.base_task import IgnoreOutputs
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.tools.translator import get_serializable
from flytekit.types.file import FlyteFile
from flytekitplugins.kfmpi import Launcher, MPIJob, Worker

from farandole.errors import ConfigError, RankFailed
from farandole.integrations.flyte import CleanPodPolicy, Farandole, RunPolicy
from helpers.flyte import IGNORED_FOLDERS, custom_of, loop, settings


class Trained(NamedTuple):
    total: float
    report: FlyteFile


pytestmark = pytest.mark.filterwarnings(IGNORED_FOLDERS)
event_loop = pytest.fixture(scope="module", autouse=True)(loop)


@task(
    task_config=Farandole(
        num_workers=4,
        min_workers=2,
        slots=2,
        requests=Resources(cpu="1"),
        limits=Resources(cpu="2", mem="4Gi"),
        launcher_requests=Resources(cpu="500m"),
        image="registry/worker:2",
        run_policy=RunPolicy(
            clean_pod_policy=CleanPodPolicy.ALL,
            ttl_seconds_after_finished=100,
            active_deadline_seconds=100,
            backoff_limit=5,
        ),
    ),
    retries=2,
)
def configured(x: int) -> int:
    return x


def test_it_serializes_to_the_plug_ins_task_type() -> None:
    template: Any = get_serializable({}, settings(), configured).template
    assert (template.type, template.task_type_version, template.metadata.retries.retries) == ("mpi", 1, 2)
    assert custom_of(configured) == {
        "launcherReplicas": {
            "replicas": 1,
            "resources": {"requests": [{"name": "CPU", "value": "500m"}]},
        },
        "workerReplicas": {
            "replicas": 4,
            "image": "registry/worker:2",
            "resources": {
                "requests": [{"name": "CPU", "value": "1"}],
                "limits": [{"name": "CPU", "value": "2"}, {"name": "MEMORY", "value": "4Gi"}],
            },
        },
        "slots": 2,
        "runPolicy": {
            "cleanPodPolicy": "CLEANPOD_POLICY_ALL",
            "backoffLimit": 5,
            "activeDeadlineSeconds": 100,
            "ttlSecondsAfterFinished": 100,
        },
    }


def test_it_asks_for_the_pods_of_an_mpi_job() -> None:
    @task(task_config=MPIJob(launcher=Launcher(replicas=1), worker=Worker(replicas=3), slots=2))
    def theirs(x: int) -> int:
        return x

    @task(task_config=Farandole(num_workers=3, slots=2))
    def ours(x: int) -> int:
        return x

    assert custom_of(ours) == custom_of(theirs)
    command = ours.get_command(settings())
    assert command[:2] == ["pyflyte-execute", "--inputs"]
    assert theirs.get_command(settings())[-len(command) : -1] == command[:-1]  # behind mpirun; the last is the name


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"num_workers": 0}, "num_workers: must be >= 1, got 0"),
        ({"num_workers": 2, "slots": 0}, "slots: must be >= 1, got 0"),
        ({"num_workers": 2, "min_workers": 3}, "min_workers: is 3, but num_workers is 2"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(given: dict[str, int], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Farandole(**given)  # type: ignore[arg-type]


@task(task_config=Farandole(num_workers=2))
def train(x: int, scale: float, folder: str) -> Trained:
    import numpy as np

    import farandole.numpy as hvd

    hvd.init()
    total = float(hvd.allreduce(np.array([scale * (x + hvd.rank())]), op=hvd.Sum)[0])
    report = Path(folder) / f"rank{hvd.rank()}"
    report.write_text(f"rank {hvd.rank()} of {hvd.size()} in {current_context().execution_id.name is not None}")
    if hvd.rank() == 0:
        current_context().checkpoint.write(b"weights")
    hvd.shutdown()
    return Trained(total, FlyteFile(str(report)))


@workflow
def trained(x: int, folder: str) -> Trained:
    return train(x=x, scale=2.0, folder=folder)


@pytest.mark.native
def test_a_local_execution_runs_ranks_and_gives_rank_0s_outputs(tmp_path: Path) -> None:
    result = trained(x=3, folder=str(tmp_path))
    assert result.total == 2.0 * (3 + 4)
    with open(result.report) as report:
        assert report.read().startswith("rank 0 of 2")
    assert {each.name for each in tmp_path.iterdir()} == {"rank0", "rank1"}


@task(task_config=Farandole(num_workers=2))
def fails(how: str) -> int:
    import os
    import signal

    rank = int(os.environ["RANK"])
    if how == "ignore":
        raise IgnoreOutputs(f"rank {rank} has none")
    if rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("no such column: 'Sales'")
    return 0


@pytest.mark.native
def test_a_ranks_failure_is_the_tasks() -> None:
    with pytest.raises(RankFailed) as failed:
        fails(how="raise")
    assert failed.value.rank == 1
    assert "no such column: 'Sales'" in str(failed.value)
    assert isinstance(failed.value.__cause__, ValueError)


@pytest.mark.native
def test_a_lost_rank_is_an_error_that_a_retry_may_mend() -> None:
    with pytest.raises(FlyteRecoverableException, match="rank 1 failed: was killed by SIGKILL"):
        fails(how="kill")


@pytest.mark.native
def test_ignored_outputs_of_rank_0_are_the_tasks() -> None:
    with pytest.raises(IgnoreOutputs, match="rank 0 has none"):
        fails(how="ignore")
