"""Where the driver of a classic session listens for its tasks."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("pyspark")

from farandole.errors import ConfigError
from farandole.spark.jobs.chosen import application_of
from farandole.spark.jobs.classic import ClassicApplication


@pytest.mark.parametrize(
    ("master", "bind", "name"),
    [
        ("local[2]", "127.0.0.1", "127.0.0.1"),  # as flytekit starts sessions on one machine
        ("local[2]", "0.0.0.0", "192.0.2.7"),
        ("local-cluster[2,1,1024]", "127.0.0.1", "192.0.2.7"),
        ("spark://master:7077", "10.0.0.1", "192.0.2.7"),  # of a container, which has another address outside
    ],
)
def test_local_tasks_find_the_driver_where_it_listens(master: str, bind: str, name: str) -> None:
    conf = {"spark.driver.host": "192.0.2.7", "spark.driver.bindAddress": bind}
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(master=master, getConf=lambda: conf))
    host = ClassicApplication(session).driver_host("", timedelta(seconds=1))
    assert (host.bind, host.name) == (bind, name)


@pytest.mark.parametrize(
    "java",
    [
        None,
        Mock(**{"sc.return_value.isStopped.return_value": True}),
        Mock(**{"sc.side_effect": ConnectionRefusedError}),
    ],
)
def test_a_stopped_session_has_no_application(java: object) -> None:
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(_jsc=java))
    with pytest.raises(ConfigError, match="spark: the session has been stopped; start one"):
        application_of(session)


def test_a_session_may_be_stopped_while_its_job_runs() -> None:
    context = Mock()
    with ClassicApplication(Mock(sparkContext=context)).job_group("group", "description") as cancel:
        context._jsc = None
        cancel()
    assert not context.cancelJobsWithTag.called and not context.removeJobTag.called
