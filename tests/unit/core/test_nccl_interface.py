"""The interface by which NCCL connects hosts: the one that the user names for the ranks' own connections."""

import os

import pytest

from farandole.config import Config
from farandole.core.context import Context
from helpers.ranks import run_ranks

VARIABLE = "NCCL_SOCKET_IFNAME"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv(VARIABLE, "")  # so that it is restored
    monkeypatch.delenv(VARIABLE)
    return monkeypatch


def told(context: Context) -> str | None:
    return os.environ.get(VARIABLE)


def test_nccl_takes_the_interface_that_is_named(environment: pytest.MonkeyPatch) -> None:
    assert run_ranks(2, told, config=Config(interface="ib7,lo")) == ["=lo"] * 2


def test_nccl_chooses_where_none_is_named(environment: pytest.MonkeyPatch) -> None:
    assert run_ranks(2, told) == [None] * 2


def test_the_users_own_variable_stays(environment: pytest.MonkeyPatch) -> None:
    environment.setenv(VARIABLE, "eth0")
    assert run_ranks(2, told, config=Config(interface="lo")) == ["eth0"] * 2
