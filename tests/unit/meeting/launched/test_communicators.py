"""Communicators of mpi4py, by a stand-in for the package."""

import sys
from types import SimpleNamespace

import pytest

from farandole.config import Config
from farandole.core import default
from farandole.errors import ConfigError
from farandole.meeting.launched import find_rendezvous
from farandole.meeting.launched.communicators import handle_of, is_communicator, places_of, spans
from farandole.topology import JobEnvironment


class Comm:
    def __init__(self, *places: int) -> None:
        self.places = places

    def Get_size(self) -> int:
        return len(self.places)

    def Get_rank(self) -> int:
        return 0

    def Get_group(self) -> tuple[int, ...]:
        return self.places


class Group:
    @staticmethod
    def Translate_ranks(some: tuple[int, ...], ranks: list[int], world: tuple[int, ...]) -> list[int]:
        return [world.index(some[rank]) for rank in ranks]


def stand_in(monkeypatch: pytest.MonkeyPatch, size: int) -> SimpleNamespace:
    mpi = SimpleNamespace(Comm=Comm, Group=Group, COMM_WORLD=Comm(*range(size)), COMM_NULL=Comm())
    mpi.Is_initialized, mpi.Is_finalized = lambda: True, lambda: False
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    return mpi


def test_places_in_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    mpi = stand_in(monkeypatch, 4)
    assert places_of(Comm(3, 1)) == [3, 1]
    assert places_of(mpi.COMM_NULL) == []
    assert is_communicator(Comm(0)) and not is_communicator([0])


def test_without_mpi4py_nothing_is_a_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    assert not is_communicator(Comm(0))
    with pytest.raises(ConfigError, match="comm: must be a communicator of mpi4py or all ranks, got Comm"):
        default.init(comm=Comm(0))


def test_a_handle_is_an_address_or_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    mpi = stand_in(monkeypatch, 1)
    for value in (ctypes.c_void_p(0x7F0012345678), ctypes.c_int(0x44000000)):
        mpi._addressof = lambda _, value=value: ctypes.addressof(value)
        mpi._sizeof = lambda _, value=value: ctypes.sizeof(value)
        assert handle_of(mpi.COMM_WORLD) == value.value


def test_a_communicator_has_the_ranks_of_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, 4)
    assert spans(Comm(0, 1), 2) and not spans(Comm(0, 1), 4)
    default.init(comm=Comm(0))
    try:
        with pytest.raises(ConfigError, match="comm: has 2 processes, but the job has 1 ranks"):
            default.init(comm=Comm(0, 1))
    finally:
        default.shutdown()


@pytest.mark.parametrize(("processes", "rank", "warned"), [(1, 0, True), (1, 1, False), (2, 0, False)])
def test_ranks_that_mpi_does_not_know_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, processes: int, rank: int, warned: bool
) -> None:
    stand_in(monkeypatch, processes)
    job = JobEnvironment(rank=rank, size=2, rendezvous="127.0.0.1:9", secret=b"s" * 32)
    find_rendezvous(Config(), job.write()).close()
    assert ("start them with: horovodrun --mpi -np 2" in caplog.text) == warned
