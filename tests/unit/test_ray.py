"""Parts of the Ray executor that need no cluster."""

from datetime import timedelta
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from farandole.errors import ConfigError
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
