"""Arguments of HorovodRunner that its kind of ranks does not use."""

import logging

import numpy
import pytest

pytest.importorskip("pyspark")

from pyspark.resource import ResourceProfileBuilder

from farandole.spark.jobs.runner import HorovodRunner


def test_arguments_without_effect_on_local_processes_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        HorovodRunner(np=-2)
        HorovodRunner(np=2, resource_profile=ResourceProfileBuilder().build, ranks_per_task=2)
        assert caplog.messages == []
        HorovodRunner(np=-2, resource_profile=ResourceProfileBuilder().build)
        HorovodRunner(np=-2, ranks_per_task=2)
    reason = "has no effect with np=-2, which starts processes on the driver and no Spark tasks"
    assert caplog.messages == [f"resource_profile {reason}", f"ranks_per_task {reason}"]


def test_a_number_of_ranks_may_be_of_numpy() -> None:
    runner = HorovodRunner(np=numpy.int64(-2))
    assert (runner.num_processor, type(runner.num_processor)) == (-2, int)
    for wrong in (2.0, "2", True, None):
        with pytest.raises(TypeError, match="np must be a whole number, got"):
            HorovodRunner(np=wrong)  # type: ignore[arg-type]
