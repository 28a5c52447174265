"""Where the driver of a classic session listens for its tasks."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")

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
