"""Flyte tasks of type `Farandole`: the serialized task, and local executions on real ranks."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from farandole.errors import ConfigError, RankFailed
from helpers.flyte import IGNORED_FOLDERS, custom_of, loop, settings
from helpers.installed import require
from helpers.mpi_operator import TrainingOperator

require("flytekitplugins")

pytestmark = pytest.mark.filterwarnings(IGNORED_FOLDERS)
event_loop = pytest.fixture(scope="module", autouse=True)(loop)


def local_files(folder: Path) -> Any:
    """Return flytekit's access to files with its scratch below `folder`."""
    from flytekit.core.data_persistence import FileAccessProvider

    return FileAccessProvider(str(folder), str(folder / "raw"))


def test_it_serializes_to_the_plug_ins_task_type() -> None:
    from flytekit.tools.translator import get_serializable

    from helpers.flyte_tasks import configured

    template: Any = get_serializable({}, settings(), configured).template
    assert (template.type, template.task_type_version, template.metadata.retries.retries) == ("mpi", 1, 2)
    assert custom_of(configured) == {
        "launcherReplicas": {
            "replicas": 1,
            "resources": {"requests": [{"name": "CPU", "value": "500m"}]},
            "restartPolicy": "RESTART_POLICY_ON_FAILURE",
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
    from helpers.flyte_tasks import ours, theirs

    wanted = custom_of(theirs)
    assert wanted["workerReplicas"].pop("resources") == {}  # see below
    assert custom_of(ours) == wanted
    command = ours.get_command(settings())
    assert command[:2] == ["pyflyte-execute", "--inputs"]
    assert theirs.get_command(settings())[-len(command) : -1] == command[:-1]  # behind mpirun; the last is the name


def test_workers_have_the_resources_of_the_task() -> None:
    """If the configuration has none. With the empty resources of the plug-in they would get those of the platform.

    Without the field the cluster gives them those of the task's node, which `with_overrides` changes."""
    from flytekit import Resources, task
    from flytekitplugins.kfmpi import Worker

    from farandole.integrations.flyte import ElasticHorovodJob, Farandole

    def resources(config: Any, **given: Resources) -> dict[str, Any] | None:
        @task(task_config=config, **given)
        def test_task() -> int:
            return 1

        custom = custom_of(test_task)
        assert custom["launcherReplicas"]["resources"] == {}
        found: dict[str, Any] | None = custom["workerReplicas"].get("resources")
        return found

    cpu, gpu = [{"name": "CPU", "value": "3"}], [{"name": "GPU", "value": "1"}]
    given = {"requests": Resources(cpu="3"), "limits": Resources(gpu="1")}
    assert resources(Farandole(num_workers=2), **given) is None
    assert resources(ElasticHorovodJob(worker=Worker(replicas=2)), **given) is None
    assert resources(Farandole(num_workers=2, limits=Resources(gpu="1")), **given) == {"requests": cpu, "limits": gpu}
    own = Farandole(num_workers=2, requests=Resources(cpu="8"))
    assert resources(own, **given) == {"requests": [{"name": "CPU", "value": "8"}], "limits": gpu}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"num_workers": 0}, "num_workers: must be >= 1, got 0"),
        ({"num_workers": 2, "slots": 0}, "slots: must be >= 1, got 0"),
        ({"num_workers": 2, "min_workers": 3}, "min_workers: is 3, but num_workers is 2"),
        ({"num_workers": "2"}, "num_workers: must be a whole number, got '2'"),
        ({"num_workers": None}, "num_workers: must be a whole number, got None"),
        ({"num_workers": 2, "slots": 1.5}, "slots: must be a whole number, got 1.5"),
        ({"num_workers": 2, "binding": "core"}, "binding: must be none or cores, got 'core'"),
        ({"num_workers": 2, "requests": "1"}, r"requests: must be flytekit's Resources\(.*\), got '1'"),
        ({"num_workers": 2, "env": {"A": 1}}, "env: variables are texts, got A=1"),
        ({"num_workers": 2, "start_timeout": -1}, "start_timeout: must be > 0, got -1 s"),
        ({"num_workers": 2, "env": {"FARANDOLE_START_TIMEOUT": "soon"}}, "FARANDOLE_START_TIMEOUT: 'soon' is no dur"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(given: dict[str, Any], sentence: str) -> None:
    from farandole.integrations.flyte import Farandole

    with pytest.raises(ConfigError, match=sentence):
        Farandole(**given)


@pytest.mark.parametrize(("running", "ranks"), [(3, 6), (2, 4)])
def test_a_task_starts_with_the_pods_that_have_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: int, ranks: int
) -> None:
    """No fewer than `min_workers`, no more than `num_workers`. If too few have come, a retry may help."""
    from flytekit import FlyteContextManager
    from flytekit.core.context_manager import ExecutionState
    from flytekit.exceptions.user import FlyteRecoverableException
    from flytekit.models.literals import LiteralMap

    from farandole.errors import HostsError
    from farandole.integrations.flyte import Farandole, FarandoleTask
    from farandole.integrations.flyte import task as module

    operator = TrainingOperator(tmp_path / "etc-mpi", slots=2)
    for name, value in operator.variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module, "reach", lambda pods, *rest: [pod.name for pod in pods])
    config = Farandole(num_workers=3, min_workers=2, slots=2, start_timeout=0.2)
    made = FarandoleTask(config, lambda: None)
    ctx = FlyteContextManager.current_context()
    cluster = ctx.with_execution_state(ctx.new_execution_state().with_params(mode=ExecutionState.Mode.TASK_EXECUTION))
    operator.write(3, running=running)
    names = [f"job-worker-{place}" for place in range(running)]
    assert made._backend(cluster.build(), config.settings()[0]) == (names, ranks)
    operator.write(3, running=1)
    with pytest.raises(HostsError, match="job-worker-1"):
        made._backend(cluster.build(), config.settings()[0])
    with FlyteContextManager.with_context(cluster), pytest.raises(FlyteRecoverableException, match="job-worker-1"):
        made.execute(literals=LiteralMap(literals={}))


@pytest.mark.native
def test_a_local_execution_runs_ranks_and_gives_rank_0s_outputs(tmp_path: Path) -> None:
    from helpers.flyte_tasks import trained

    result = trained(x=3, folder=str(tmp_path))
    assert result.total == 2.0 * (3 + 4)
    with open(result.report) as report:
        assert report.read().startswith("rank 0 of 2")
    assert {each.name for each in tmp_path.iterdir()} == {"rank0", "rank1"}


@pytest.mark.native
def test_a_ranks_failure_is_the_tasks() -> None:
    from helpers.flyte_tasks import fails

    with pytest.raises(RankFailed) as failed:
        fails(how="raise")
    assert failed.value.rank == 1
    assert "no such column: 'Sales'" in str(failed.value)
    assert isinstance(failed.value.__cause__, ValueError)


@pytest.mark.native
def test_a_lost_rank_is_an_error_that_a_retry_may_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flytekit.exceptions.user import FlyteRecoverableException

    from helpers.flyte_tasks import fails

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(FlyteRecoverableException, match="rank 1 failed: was killed by SIGKILL"):
        fails(how="kill")
    assert list(tmp_path.glob("farandole-*")) == []  # what a killed rank has made stays
    with pytest.raises(FlyteRecoverableException, match=r"rank \d failed: .*rank \d is lost"):
        fails(how="miss")


@pytest.mark.native
def test_a_rank_0_that_calls_sys_exit_lacks_its_outputs() -> None:
    from helpers.flyte_tasks import fails

    with pytest.raises(RankFailed, match=r"output 'o0' of task '.*fails' on rank 0 is NoneType"):
        fails(how="leave")


@pytest.mark.native
def test_ignored_outputs_of_rank_0_are_the_tasks() -> None:
    from flytekit.core.base_task import IgnoreOutputs

    from helpers.flyte_tasks import fails

    with pytest.raises(IgnoreOutputs, match="rank 0 has none"):
        fails(how="ignore")


@pytest.mark.native
def test_rank_0s_decks_are_the_tasks(tmp_path: Path) -> None:
    """An input may have any name."""
    from flytekit import FlyteContextManager

    from helpers.flyte_tasks import shown

    ctx = FlyteContextManager.current_context()
    with FlyteContextManager.with_context(ctx.with_file_access(local_files(tmp_path))):
        assert shown(literals=3) == 6
    (deck,) = tmp_path.rglob("deck.html")
    assert "<b>after 3 epochs</b>" in deck.read_text()


@pytest.mark.native
def test_a_task_is_mapped_over_lists() -> None:
    from helpers.flyte_tasks import mapped

    assert mapped() == [6, 8]


PROGRAM = """
from flytekit import task
from farandole.integrations.flyte import Farandole

@task(task_config=Farandole(num_workers=1))
def doubled(x: int) -> int:
    return 2 * x
"""


@pytest.mark.native
def test_ranks_import_a_module_whose_folder_has_left_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `pyflyte run flows/training.py doubled` does it."""
    (tmp_path / "flows").mkdir()
    (tmp_path / "flows" / "__init__.py").touch()
    (tmp_path / "flows" / "training.py").write_text(PROGRAM)
    with monkeypatch.context() as loading:
        loading.syspath_prepend(str(tmp_path))
        training = importlib.import_module("flows.training")
    monkeypatch.delitem(sys.modules, "flows")
    assert training.doubled(x=21) == 42
    monkeypatch.delitem(sys.modules, "flows.training")


@pytest.mark.native
@pytest.mark.parametrize(("count", "returned"), [(0, "int"), (3, "3 values")])
def test_outputs_that_are_not_as_many_as_declared(count: int, returned: str) -> None:
    from helpers.flyte_tasks import unequal

    sentence = rf"TypeError: task '.*unequal' has 2 outputs \(o0, o1\); rank 0 returned {returned}"
    with pytest.raises(RankFailed, match=sentence):
        unequal(count=count)


def test_a_structured_dataset_gives_each_rank_its_rows(tmp_path: Path) -> None:
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq
    from flytekit import FlyteContextManager
    from flytekit.core.type_engine import TypeEngine
    from flytekit.types.structured import StructuredDataset

    import farandole.integrations.flyte  # noqa: F401  registers the decoder
    from farandole.data import Loader, ParquetSource

    def numbers_of(dataset: StructuredDataset) -> list[list[int]]:
        read: list[list[int]] = []
        for rank in range(2):
            source = dataset.open(ParquetSource).all()
            assert isinstance(source, ParquetSource)
            loader = Loader(source, batch_size=2, policy="drop", rank=rank, size=2)
            read.append([int(row) for batch in loader for row in batch["n"]])
        return read

    ctx = FlyteContextManager.current_context()
    kind = TypeEngine.to_literal_type(StructuredDataset)
    pq.write_table(pa.table({"n": range(8)}), tmp_path / "part.parquet", row_group_size=2)
    written = StructuredDataset(dataframe=pd.DataFrame({"n": range(8)}))  # as a task before this one returns it
    for dataset in (written, StructuredDataset(uri=str(tmp_path), file_format="parquet")):
        literal = TypeEngine.to_literal(ctx, dataset, StructuredDataset, kind)
        first, second = numbers_of(TypeEngine.to_python_value(ctx, literal, StructuredDataset))
        assert sorted(first + second) == list(range(8)) and len(first) == len(second) == 4


@pytest.mark.native
def test_a_second_attempt_resumes_from_the_tasks_checkpoint(tmp_path: Path) -> None:
    from flytekit.core.checkpointer import SyncCheckpoint
    from flytekit.core.context_manager import ExecutionState, FlyteContextManager
    from flytekit.core.type_engine import TypeEngine
    from flytekit.exceptions.user import FlyteRecoverableException
    from flytekit.models.literals import LiteralMap

    from helpers.flyte_tasks import resumed

    def attempt(number: int) -> list[int]:
        # As the entrypoint of Flyte does it: each attempt writes to a place of its own and reads that of the last one.
        before = str(tmp_path / str(number - 1)) if number > 1 else None
        ctx = FlyteContextManager.current_context()
        params = ctx.user_space_params.builder()
        params.checkpoint = SyncCheckpoint(str(tmp_path / str(number)), before)
        state = ctx.new_execution_state().with_params(
            mode=ExecutionState.Mode.LOCAL_TASK_EXECUTION, user_space_params=params.build()
        )
        with FlyteContextManager.with_context(ctx.with_execution_state(state)) as inner:
            given = resumed.dispatch_execute(inner, LiteralMap({}))
            done: list[int] = TypeEngine.literal_map_to_kwargs(inner, given, {"o0": list[int]})["o0"]
        return done

    with pytest.raises(FlyteRecoverableException, match="rank 1 failed: was killed by SIGKILL"):
        attempt(1)
    assert attempt(2) == [0, 1, 102, 103]
