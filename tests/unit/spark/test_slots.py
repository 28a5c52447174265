"""How many ranks fit is judged from what Spark promises and what is there."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.resource import ExecutorResourceRequests, ResourceProfileBuilder, TaskResourceRequests

from farandole.errors import ConfigError, SlotsError, SlotsTimeout
from farandole.spark.jobs import slots
from farandole.spark.jobs.application import is_local
from farandole.spark.jobs.slots import SETTLED, Cluster, cluster_of, decide, needed

MINUTE = timedelta(minutes=1)
NO_TIME = timedelta(0)


@pytest.mark.parametrize(
    ("master", "conf", "promised"),
    [
        ("local-cluster[2,1,1024]", {}, 2),
        ("local-cluster[3, 4, 1024]", {"spark.task.cpus": "2"}, 6),
        ("yarn", {"spark.executor.instances": "4", "spark.executor.cores": "8"}, 32),
        ("yarn", {"spark.executor.instances": "4"}, 4),
        (
            "k8s://https://host",
            {"spark.executor.instances": "2", "spark.executor.cores": "3", "spark.task.cpus": "2"},
            2,
        ),
        ("yarn", {}, None),
        # A standalone executor has all cores of its machine, however many these are.
        ("spark://host:7077", {"spark.executor.instances": "2"}, None),
        ("spark://host:7077", {"spark.executor.instances": "2", "spark.executor.cores": "4"}, 8),
        (
            "yarn",
            {
                "spark.executor.instances": "2",
                "spark.executor.cores": "4",
                "spark.executor.resource.gpu.amount": "2",
                "spark.task.resource.gpu.amount": "2",
            },
            2,
        ),
    ],
)
def test_promised_slots(master: str, conf: dict[str, str], promised: int | None) -> None:
    assert Cluster.read(master, conf).promised == promised


def test_dynamic_allocation_counts_only_on_a_cluster() -> None:
    conf = {"spark.dynamicAllocation.enabled": "TRUE"}
    assert Cluster.read("yarn", conf).dynamic
    assert not Cluster.read("local[2]", conf).dynamic


def test_a_resource_that_tasks_need_is_noticed() -> None:
    assert (
        Cluster.read("local[2]", {"spark.task.resource.gpu.amount": "1"}).resource == "spark.task.resource.gpu.amount"
    )
    assert Cluster.read("local[2]", {}).resource == ""


@pytest.mark.parametrize(
    ("master", "local"), [("local", True), ("local[*]", True), ("local-cluster[2,1,1024]", False), ("yarn", False)]
)
def test_local_masters(master: str, local: bool) -> None:
    assert is_local(master) is local


def judge(*, present: int, promised: int | None, unchanged: timedelta = NO_TIME, waited: timedelta = NO_TIME) -> str:
    return decide(4, present=present, promised=promised, unchanged=unchanged, waited=waited, patience=MINUTE)


def test_enough_slots_start_at_once() -> None:
    assert judge(present=4, promised=None) == "go"
    assert judge(present=5, promised=2) == "go"


def test_a_promise_that_is_too_small_is_refused_at_once() -> None:
    assert judge(present=0, promised=3) == "refuse"


def test_promised_executors_are_waited_for() -> None:
    assert judge(present=1, promised=4, unchanged=MINUTE / 2, waited=MINUTE / 2) == "wait"
    assert judge(present=1, promised=4, unchanged=MINUTE / 2, waited=MINUTE) == "timeout"


def test_without_a_promise_a_number_that_stays_is_believed() -> None:
    assert judge(present=2, promised=None, unchanged=SETTLED / 2, waited=SETTLED) == "wait"
    assert judge(present=2, promised=None, unchanged=SETTLED, waited=SETTLED) == "refuse"


def test_an_application_without_any_executor_is_still_starting() -> None:
    assert judge(present=0, promised=None, unchanged=MINUTE / 2, waited=MINUTE / 2) == "wait"
    assert judge(present=0, promised=None, unchanged=MINUTE, waited=MINUTE) == "timeout"


def test_promised_executors_that_do_not_come_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    conf = {"spark.executor.instances": "2", "spark.executor.cores": "4"}
    application = SimpleNamespace(master="yarn", settings=conf, slots=lambda task_cpus, profile: 4)
    monkeypatch.setattr(slots, "application_of", lambda spark: application)
    spark: Any = None
    with pytest.raises(SlotsTimeout, match=r"8 slots, but Spark \(yarn\) after 0 s has 4; ask for at most 4"):
        slots.require_slots(spark, 8, patience=NO_TIME)
    with pytest.raises(SlotsError, match=r"9 slots, but Spark \(yarn\) has 8; ask for at most 8"):
        slots.require_slots(spark, 9, patience=NO_TIME)


def test_a_profile_replaces_the_needs_of_tasks() -> None:
    profile = ResourceProfileBuilder().require(TaskResourceRequests().cpus(2).resource("gpu", 0.5)).build
    conf = {"spark.executor.cores": "8", "spark.task.cpus": "4", "spark.task.resource.fpga.amount": "1"}
    assert needed(conf, None) == conf
    cluster = Cluster.read("yarn", {**needed(conf, profile), "spark.executor.instances": "3"})
    assert (cluster.task_cpus, cluster.gpus, cluster.resource) == (2, "0.5", "spark.task.resource.gpu.amount")
    assert cluster.promised == 12


def test_a_task_of_several_ranks_is_as_many_slots() -> None:
    conf = {"spark.executor.instances": "2", "spark.executor.cores": "3", "spark.task.resource.gpu.amount": "2"}
    assert Cluster.read("yarn", conf, ranks_per_task=2).promised == 12
    application: Any = SimpleNamespace(master="yarn", settings=conf)
    assert cluster_of(application, None, ranks_per_task=2).ranks_per_task == 2
    with pytest.raises(ConfigError, match="ranks_per_task: is 3, but tasks have 2 GPUs"):
        cluster_of(application, None, ranks_per_task=3)


def test_fractions_of_gpus_are_refused() -> None:
    application: Any = SimpleNamespace(master="yarn", settings={"spark.task.resource.gpu.amount": "0.5"})
    with pytest.raises(ConfigError, match=r"spark\.task\.resource\.gpu\.amount: is 0\.5, but .*resource profile"):
        cluster_of(application, None)
    without = ResourceProfileBuilder().require(TaskResourceRequests().cpus(1)).build
    assert cluster_of(application, without).gpus == ""


def test_profiles_that_no_barrier_stage_can_have_are_refused() -> None:
    def application(master: str) -> Any:
        return SimpleNamespace(master=master, settings={})

    tasks = ResourceProfileBuilder().require(TaskResourceRequests().cpus(1))
    with pytest.raises(ConfigError, match=r"resource_profile: is for clusters.*leave it out on local\[2\]"):
        cluster_of(application("local[2]"), tasks.build)
    executors = tasks.require(ExecutorResourceRequests().cores(4))
    with pytest.raises(ConfigError, match="resource_profile: asks for executors with cores"):
        cluster_of(application("yarn"), executors.build)
