"""Parts of the Ray executor that need no cluster."""

from datetime import timedelta
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayTaskError, UnserializableException

from farandole.compat.ray import ElasticRayExecutor
from farandole.errors import ConfigError, RankFailed
from farandole.ray import RayExecutor, executor
from farandole.ray.placement import Demand, reserve


def test_ranks_without_any_resource_are_refused_before_ray_is_asked() -> None:
    demand = Demand(ranks=2, hosts=None, cpus=0, gpus=0)
    with pytest.raises(ConfigError, match="cpus_per_worker: is 0 without use_gpu"):
        reserve(demand, timedelta(0), use_current=False)


def test_each_value_is_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []

    def get(reference: str) -> str:
        fetched.append(reference)
        return reference.upper()

    def wait(waiting: list[str], timeout: float | None) -> tuple[list[str], list[str]]:
        return waiting[-1:], waiting[:-1]  # the last rank ends first

    monkeypatch.setattr(executor, "ray", SimpleNamespace(wait=wait, get=get))
    assert RayExecutor(num_workers=3)._values(["a", "b", "c"]) == ["A", "B", "C"]
    assert fetched == ["c", "b", "a"]


# As Ray writes it for an exception whose class cannot unpickle it.
TEXT = """ray.exceptions.RayTaskError: \x1b[36mray::RankActor.run()\x1b[39m (pid=1, ip=192.0.2.2)
           ^^^^^^^^
  File "train.py", line 7, in train
    raise OwnError(1, 2)
OwnError: no such thing
"""


def test_a_rank_is_not_dead_if_its_exception_cannot_be_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = {"first": ValueError("cause"), "second": UnserializableException(TEXT)}
    errors = {name: RayTaskError("run", TEXT, error) if name == "first" else error for name, error in failures.items()}

    def get(reference: str) -> None:
        raise errors[reference]

    monkeypatch.setattr(executor, "ray", SimpleNamespace(wait=lambda refs, timeout: (refs[:1], refs[1:]), get=get))
    with pytest.raises(RankFailed, match="rank 0 failed: ValueError: cause"):
        RayExecutor(num_workers=2)._values(["first", "second"])
    with pytest.raises(RankFailed) as caught:
        RayExecutor(num_workers=1)._values(["second"])
    assert str(caught.value).startswith("rank 0 failed: OwnError: no such thing\n--- traceback of rank 0 ---")
    assert '"train.py", line 7' in str(caught.value) and "ray::" not in str(caught.value)
    assert "cannot be unpickled here" in caught.value.__notes__[0]


def test_elastic_settings_of_horovods_examples_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    settings = ElasticRayExecutor.create_settings(2, max_np=4, verbose=True)
    assert (settings.sizes.min_num_proc, settings.sizes.max_num_proc) == (2, 4)
    assert "verbose has no effect: set the level of Python's logger 'farandole'" in caplog.text
    ElasticRayExecutor(settings, cpus_per_slot=2)
