"""A `HorovodRunner` in a Spark task of Flyte, executed by flytekit."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("pyspark")

from pyspark.sql import SparkSession

from helpers.flyte import IGNORED_FOLDERS, loop
from helpers.installed import require

require("flytekitplugins")

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings(IGNORED_FOLDERS),
]
event_loop = pytest.fixture(scope="module", autouse=True)(loop)


def test_a_runner_runs_on_the_tasks_session(spark: SparkSession) -> None:
    from helpers.flyte_models import runs_in_spark

    assert runs_in_spark(value=21) == 42
