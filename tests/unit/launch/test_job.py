"""A job on two hosts, through a backend that starts nothing: assignments, environments, ends."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

import pytest

from farandole.errors import ConfigError, SlotsError
from farandole.launch.backend import Assignment, Command, Host, OnEnd, OnLine, Task
from farandole.launch.failures import Failure
from farandole.launch.job import open_job
from farandole.launch.run import run
from farandole.meeting.launched.elastic import MemberEnvironment

TASK = Command(["train"])


class FakeRank:
    """A rank that has ended before it is asked."""

    def __init__(self, rank: int, log: list[str]) -> None:
        self.rank = rank
        self._log = log

    def terminate(self, grace: timedelta) -> None:
        self._log.append(f"terminate {self.rank}")

    def wait_gone(self, timeout: timedelta) -> bool:
        return True

    def value(self) -> bytes:
        return f"value {self.rank}".encode()


class FakeAgent:
    first_slot = 0

    def __init__(self, backend: "FakeBackend", host: Host, address: str) -> None:
        self.address, self.cores, self.usable_cores = address, [4, 5, 6, 7], 4
        self._backend, self._host, self.identity = backend, host, host.name

    def reserve_port(self) -> int:
        self._backend.log.append(f"reserve a port on {self._host.name}")
        return 4711

    def is_stopped(self, member: int, secret: bytes) -> bool:
        raise NotImplementedError

    @property
    def silence(self) -> float:
        raise NotImplementedError

    def end_member(self, member: int, secret: bytes) -> None:
        raise NotImplementedError

    def noted_end(self, log: str) -> int | None:
        raise NotImplementedError

    def start(self, each: Assignment, task: Task, on_line: OnLine, on_end: OnEnd) -> FakeRank:
        assert each.host == self._host
        assert task is TASK
        self._backend.log.append(f"start {each.rank} on {self._host.name}")
        on_end(each.rank, self._backend.failures.get(each.rank))
        return FakeRank(each.rank, self._backend.log)


class FakeBackend:
    """Two hosts, "a" with two slots and "b" with four."""

    address = "127.0.0.1"
    hosts: Sequence[Host] = (Host("a", 2), Host("b", 4))

    def __init__(self, failures: Sequence[Failure] = ()) -> None:
        self.log: list[str] = []
        self.failures = {failure.rank: failure for failure in failures}

    @contextmanager
    def open_agents(self, hosts: Sequence[Host]) -> Iterator[Mapping[Host, FakeAgent]]:
        names = " ".join(host.name for host in hosts)
        self.log.append(f"open {names}")
        yield {host: FakeAgent(self, host, f"address-of-{host.name}") for host in hosts}
        self.log.append(f"close {names}")


def no_line(rank: int, stream: str, line: str) -> None:
    raise AssertionError(line)


def test_ranks_fill_the_hosts() -> None:
    backend = FakeBackend()
    with open_job(5, {"MINE": "x"}, backend=backend, binding="cores") as job:
        assert job.run(TASK, no_line) is None
        assert job.values() == [b"value 0", b"value 1", b"value 2", b"value 3", b"value 4"]
        assignments = job.assignments
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert [[int(each.env[f"FARANDOLE_{name}"]) for name in names] for each in assignments] == [
        [0, 5, 0, 2, 0, 2],
        [1, 5, 1, 2, 0, 2],
        [2, 5, 0, 3, 1, 2],
        [3, 5, 1, 3, 1, 2],
        [4, 5, 2, 3, 0, 1],
    ]
    assert [each.cores for each in assignments] == [(4, 5), (6, 7), (4,), (5,), (6, 7)]
    assert [each.env["OMP_NUM_THREADS"] for each in assignments] == ["2", "2", "1", "1", "1"]
    assert {each.env["MASTER_ADDR"] + ":" + each.env["MASTER_PORT"] for each in assignments} == {"address-of-a:4711"}
    assert {
        (each.env["MINE"], each.env["FARANDOLE_SECRET"], each.env["FARANDOLE_RENDEZVOUS"]) for each in assignments
    } == {("x", assignments[0].env["FARANDOLE_SECRET"], assignments[0].env["FARANDOLE_RENDEZVOUS"])}
    assert backend.log == [
        *("open a b", "reserve a port on a"),
        *("start 0 on a", "start 1 on a", "start 2 on b", "start 3 on b", "start 4 on b"),
        *(f"terminate {rank}" for rank in range(5)),
        "close a b",
    ]


def test_programs_of_horovod_get_no_variables_of_torchrun() -> None:
    """accelerate would start gloo by them, and divide each rank's rows once more."""
    outer = {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "8", "MINE": "x"}
    with open_job(2, outer | {"FARANDOLE_TORCH_ENV": "no"}, backend=FakeBackend()) as job:
        for each in job.assignments:
            assert not each.env.keys() & (outer.keys() - {"MINE"} | {"MASTER_ADDR", "MASTER_PORT"})
            assert (each.env["MINE"], each.env["FARANDOLE_TORCH_STORE"]) == ("x", "address-of-a:4711")


def test_ranks_do_not_inherit_the_place_of_their_launcher() -> None:
    """A rank or a member of an elastic job may start a job: its ranks would join the outer job in its place."""
    member = MemberEnvironment(number=3, launcher="127.0.0.1:1", secret=b"outer", survives=True)
    outer = member.write() | {"FARANDOLE_GENERATION": "7", "HOROVOD_ELASTIC": "1", "MINE": "x"}
    with open_job(2, outer, backend=FakeBackend()) as job:
        for rank, each in enumerate(job.assignments):
            assert not each.env.keys() & (member.write().keys() | {"HOROVOD_ELASTIC"})
            assert (each.env["MINE"], each.env["FARANDOLE_RANK"], each.env["FARANDOLE_GENERATION"]) == (
                "x",
                str(rank),
                "0",
            )


def test_a_host_without_a_rank_has_no_agent() -> None:
    backend = FakeBackend()
    with open_job(2, {}, backend=backend) as job:
        assert [each.cores for each in job.assignments] == [(), ()]
    assert backend.log == ["open a", "reserve a port on a", "close a"]


def test_the_first_failure_of_any_host_is_reported() -> None:
    late = Failure(rank=0, reason="lost rank 3", code=1, consequence=True)
    backend = FakeBackend([late, Failure(rank=3, reason="exited with code 9", code=9)])
    with open_job(6, {}, backend=backend) as job:
        failure = job.run(TASK, no_line)
    assert failure is not None
    assert (failure.rank, failure.code) == (3, 9)
    assert backend.log[-7:] == [*(f"terminate {rank}" for rank in range(6)), "close a b"]


def test_ranks_that_do_not_fit() -> None:
    backend = FakeBackend()
    with pytest.raises(SlotsError, match="7 ranks need 7 slots, but a:2, b:4 has 6"), open_job(7, {}, backend=backend):
        pass
    with pytest.raises(ConfigError, match="num_proc: must be >= 1, got 0"), open_job(0, {}, backend=backend):
        pass
    with pytest.raises(ConfigError, match="num_proc: must be an integer, got None"):
        run(int, num_proc=None)  # type: ignore[arg-type]
    unexpected = r"run\(\) got an unexpected keyword argument"
    with pytest.raises(TypeError, match=f"{unexpected} 'np'; the number of ranks is num_proc"):
        run(int, np=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=f"{unexpected} 'host'$"):
        run(int, host="a:2", slots=2)  # type: ignore[call-arg]
    refused = pytest.raises(ConfigError, match="binding: must be none or cores, got 'core'")
    with refused, open_job(2, {}, backend=backend, binding="core"):  # type: ignore[arg-type]
        pass
    assert backend.log == []


def test_this_machine_is_the_default() -> None:
    with open_job(2, {}, binding="cores") as job:
        assert [each.host for each in job.assignments] == [Host("localhost", 2)] * 2
        assert {core for each in job.assignments for core in each.cores} <= os.sched_getaffinity(0)
