"""Parts of the Ray executor that need no cluster."""

from datetime import timedelta

import pytest

pytest.importorskip("ray")

from farandole.errors import ConfigError
from farandole.ray.placement import Demand, reserve


def test_ranks_without_any_resource_are_refused_before_ray_is_asked() -> None:
    demand = Demand(ranks=2, hosts=None, cpus=0, gpus=0)
    with pytest.raises(ConfigError, match="cpus_per_worker: is 0 without use_gpu"):
        reserve(demand, timedelta(0), use_current=False)
