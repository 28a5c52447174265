"""The arguments that choose Horovod's transport: Spark's ranks connect by themselves."""

import logging

import pytest

pytest.importorskip("pyspark")

from farandole.errors import ConfigError
from farandole.estimators.backend import SparkBackend
from farandole.spark.jobs import session

WARNING = "use_gloo has no effect: ranks connect without MPI unless use_mpi asks for it"


class NoSessionNeeded(Exception):
    """The call has come as far as its session."""


def no_session() -> None:
    raise NoSessionNeeded


def test_use_gloo_is_warned_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "active_session", no_session)
    with caplog.at_level(logging.WARNING), pytest.raises(NoSessionNeeded):
        session.run(print, use_gloo=True)
    assert caplog.messages == [WARNING]
    caplog.clear()
    with caplog.at_level(logging.WARNING), pytest.raises(NoSessionNeeded):
        session.run(print, use_gloo=False)
    assert caplog.messages == []


def test_a_backend_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        backend = SparkBackend(num_proc=1, use_gloo=True)
    assert caplog.messages == [WARNING]
    assert "use_gloo" not in backend._kwargs


def test_mpi_is_refused() -> None:
    for given in ({"use_mpi": True}, {"extra_mpi_args": "-x A"}):
        with pytest.raises(ConfigError, match="use_mpi: ranks of a Spark job connect by themselves"):
            SparkBackend(num_proc=1, **given)
