"""Which transport carries the tensors: interconnects of a host, and the decision of all ranks."""

import logging
from pathlib import Path

import pytest

from farandole.config import Config
from farandole.core.wiring import choice
from farandole.core.wiring.choice import OWN, Offer, decide, log_choice, offer
from farandole.core.wiring.mpi import MpiFabric
from farandole.errors import ConfigError
from farandole.launch.doctor.facts import _machine
from farandole.meeting.frames import Deadline
from farandole.meeting.launched import interconnects
from farandole.meeting.launched.interconnects import find_interconnects
from farandole.meeting.launched.mpi import MpiProcess
from farandole.meeting.rendezvous import ThreadRendezvous
from helpers.kernel_files import add_port, add_slingshot

TWO = ["a", "b"]
NO_MPI = -1


def found(root: Path) -> list[str]:
    return list(map(str, find_interconnects(root)))


def test_a_machine_without_an_interconnect(tmp_path: Path) -> None:
    assert found(tmp_path) == []


def test_what_each_interconnect_is_called(tmp_path: Path) -> None:
    add_port(tmp_path)
    add_port(tmp_path, "hfi1_0", file="hfi1_0")
    add_slingshot(tmp_path)
    assert found(tmp_path) == [
        "Omni-Path hfi1_0 port 1 (200 Gb/sec (4X HDR))",
        "InfiniBand mlx5_0 port 1 (200 Gb/sec (4X HDR))",
        "Slingshot cxi0",
    ]


@pytest.mark.parametrize(
    ("port", "obstacle"),
    [
        ({"state": "1: DOWN"}, "it is not active"),
        ({"link": "Ethernet"}, "its link is Ethernet; FARANDOLE_FABRIC=mpi asks for MPI there"),
        ({"file": None}, "there is no /dev/infiniband/uverbs* that this process may open"),
        ({"device": "hfi1_0", "file": None}, "there is no /dev/infiniband/uverbs* that this process may open"),
    ],
)
def test_what_makes_a_port_useless(port: dict[str, str], obstacle: str, tmp_path: Path) -> None:
    add_port(tmp_path, **port)
    (only,) = find_interconnects(tmp_path)
    assert only.obstacle == obstacle


def test_a_container_that_only_sees_its_hosts_slingshot(tmp_path: Path) -> None:
    add_slingshot(tmp_path, file=None)
    assert found(tmp_path) == ["Slingshot cxi0: there is no /dev/cxi0 that this process may open"]


def offers(*given: tuple[str, int] | tuple[str, int, str]) -> list[Offer]:
    """Return offers of MPI, at the given number, unless that is `NO_MPI`."""
    return [
        Offer(each[0], *((OWN, "") if each[1] == NO_MPI else ("mpi", str(each[1]))), each[2] if len(each) == 3 else "")
        for each in given
    ]


@pytest.mark.parametrize(
    ("given", "hosts", "by_mpi"),
    [
        ([("mpi", 0), ("mpi", 1)], ["a", "a"], True),
        ([("auto", 0), ("auto", 1)], TWO, True),
        ([("auto", 0), ("auto", 1)], ["a", "a"], False),  # shared memory is faster
        ([("auto", 0), ("auto", NO_MPI)], TWO, False),
        ([("auto", 0), ("tcp", NO_MPI)], TWO, False),
        ([("auto", NO_MPI), ("auto", NO_MPI)], TWO, False),
        ([("mpi", NO_MPI)], ["a"], False),
    ],
)
def test_what_ranks_decide(given: list[tuple[str, int]], hosts: list[str], by_mpi: bool) -> None:
    assert decide(offers(*given), hosts) == ("mpi" if by_mpi else OWN)


def test_ranks_that_ask_for_mpi_and_ranks_that_do_not() -> None:
    with pytest.raises(ConfigError, match="fabric: is mpi, but not on rank 1; set it alike on all ranks"):
        decide(offers(("mpi", 0), ("auto", 1)), TWO)


def test_a_job_that_has_not_met_by_mpi_offers_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As below farandole run, whose own processes may be mpirun's."""
    add_port(tmp_path)
    monkeypatch.setattr(interconnects, "ROOT", tmp_path)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    rendezvous = ThreadRendezvous.group(2)[0]
    assert offer(rendezvous, Config(), Deadline(Config().start_timeout)) == (Offer("auto"), None)


class Process(MpiProcess):
    """A place in MPI without MPI."""

    path, rank = "/lib/libmpi.so.40", 0

    def __init__(self) -> None:
        """Load nothing."""

    @property
    def abi(self) -> str:
        return "Open MPI"


@pytest.mark.parametrize(
    ("second", "hosts", "said"),
    [
        (
            ("auto", 1, "cxi0"),
            TWO,
            "tensors go over MPI, /lib/libmpi.so.40 (Open MPI), because every host has an interconnect, rank 0's "
            "mlx5_0; FARANDOLE_FABRIC=mpi asks for it, FARANDOLE_FABRIC=tcp for TCP",
        ),
        (
            ("auto", NO_MPI, "mlx5_0: it is not active"),
            TWO,
            "tensors go over TCP, although hosts have an interconnect (mlx5_0): not rank 1 (mlx5_0: it is not active); "
            "FARANDOLE_FABRIC=tcp asks for it",
        ),
        (
            ("tcp", NO_MPI),
            TWO,
            "tensors go over TCP, although hosts have an interconnect (mlx5_0): not rank 1 (fabric is tcp there); "
            "FARANDOLE_FABRIC=tcp asks for it",
        ),
        (("auto", 1, "mlx5_0"), ["a", "a"], None),
    ],
)
def test_what_is_logged(
    second: tuple[str, int, str], hosts: list[str], said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger=choice.log.name):
        log_choice(offers(("auto", 0, "mlx5_0"), second), hosts, MpiFabric(Process()))
    assert [record.getMessage() for record in caplog.records] == ([said] if said else [])


def test_the_doctor_lists_interconnects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_port(tmp_path)
    add_port(tmp_path, "mlx5_1", link="Ethernet")
    monkeypatch.setattr(interconnects, "ROOT", tmp_path)
    (fact,) = [each for each in _machine() if each.name == "interconnects"]
    assert fact.value == (
        "InfiniBand mlx5_0 port 1 (200 Gb/sec (4X HDR)); InfiniBand mlx5_1 port 1 (200 Gb/sec (4X HDR)): its link is "
        "Ethernet; FARANDOLE_FABRIC=mpi asks for MPI there"
    )
