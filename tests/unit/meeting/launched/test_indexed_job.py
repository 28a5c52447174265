"""Pods of a Kubernetes Indexed Job: their variables, and their meeting at rank 0."""

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from farandole.config import Config
from farandole.errors import ConfigError, RendezvousError
from farandole.meeting.launched import find_rendezvous
from farandole.meeting.rendezvous import Rendezvous, SoloRendezvous

SECRET = "5a" * 32
LIMIT = timedelta(seconds=60)


@contextmanager
def free_port() -> Iterator[int]:
    """Reserve a port that only a listener with SO_REUSEADDR, as ours is, can take."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def pod(index: int, port: int, size: int = 3, host: str = "127.0.0.1", **more: str) -> dict[str, str]:
    job = {"FARANDOLE_SIZE": str(size), "FARANDOLE_RENDEZVOUS": f"{host}:{port}", "FARANDOLE_SECRET": SECRET}
    return {"JOB_COMPLETION_INDEX": str(index), **job, **more}


def test_pods_meet_at_rank_0() -> None:
    """Rank 0 comes last."""
    with free_port() as port, ThreadPoolExecutor(3) as pool, ExitStack() as stack:

        def meet(index: int) -> list[bytes]:
            met = find_rendezvous(Config(), pod(index, port))
            stack.callback(met.close)
            assert (met.rank, met.size) == (index, 3)
            return met.allgather(bytes([index]), timeout=LIMIT)

        waiting = [pool.submit(meet, index) for index in (2, 1, 0)]
        assert [each.result() for each in waiting] == [[b"\0", b"\1", b"\2"]] * 3


def test_pods_with_another_secret_or_size_do_not_meet() -> None:
    with free_port() as port, ExitStack() as stack:
        first = find_rendezvous(Config(), pod(0, port))
        stack.callback(first.close)
        stranger = find_rendezvous(Config(), pod(1, port, FARANDOLE_SECRET="00" * 32))
        with pytest.raises(RendezvousError, match="not a member of this job"):
            stranger.allgather(b"", timeout=LIMIT)
        other = find_rendezvous(Config(), pod(1, port, size=2))
        with pytest.raises(RendezvousError, match=r"size|ranks"):
            other.allgather(b"", timeout=LIMIT)


def test_a_world_that_stays_smaller_names_the_missing_ranks() -> None:
    with free_port() as port, ExitStack() as stack:
        first = find_rendezvous(Config(), pod(0, port))
        stack.callback(first.close)
        with pytest.raises(RendezvousError, match="missing: ranks 1 and 2"):
            first.allgather(b"", timeout=timedelta(seconds=0.5))


def test_a_name_without_an_address() -> None:
    met = find_rendezvous(Config(), pod(1, 29400, host="train-0.train.invalid"))
    with pytest.raises(RendezvousError, match=r"rank 1 could not .*train-0\.train\.invalid has no address here"):
        met.allgather(b"", timeout=timedelta(seconds=0.5))


def address_of(met: Rendezvous) -> str | None:
    met.close()
    return met.address


def test_rank_0_is_found_by_the_pods_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "train-12.train.team.svc.cluster.local")
    env = pod(12, 1, size=16)
    del env["FARANDOLE_RENDEZVOUS"]
    assert address_of(find_rendezvous(Config(), env)) == "train-0.train.team.svc.cluster.local:29400"
    for name in ("train-12", "node.example", "train-2.train.team"):
        monkeypatch.setattr(socket, "getfqdn", lambda name=name: name)
        with pytest.raises(ConfigError, match=rf"is not set, and the name of this pod \({name}\) does not show"):
            find_rendezvous(Config(), env)


def test_rank_0_listens_at_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Service may publish its name later than the pod starts."""
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.0.3")
    with free_port() as port:
        met = find_rendezvous(Config(), pod(0, port, host="train-0.train.invalid"))
        assert address_of(met) == f"127.0.0.3:{port}"
        met = find_rendezvous(Config(interface="127.0.0.4"), pod(0, port, host="train-0.train.invalid"))
        assert address_of(met) == f"127.0.0.4:{port}"
        monkeypatch.setattr(socket, "gethostname", lambda: "nobody.invalid")
        with pytest.raises(ConfigError, match=r"no address of this pod, .* index 0; neither is nobody\.invalid"):
            find_rendezvous(Config(), pod(0, port, host="there.invalid"))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"FARANDOLE_SECRET": ""}, "FARANDOLE_SECRET: is not set; the pods prove by it"),
        ({"FARANDOLE_SECRET": "5a5a"}, "FARANDOLE_SECRET: has 2 bytes"),
        ({"FARANDOLE_SECRET": "sesame"}, "FARANDOLE_SECRET: is not written in hexadecimal digits"),
        ({"FARANDOLE_SIZE": "1"}, "FARANDOLE_SIZE: is 1, but this pod has index 1; set it to the Job's completions"),
        ({"FARANDOLE_SIZE": "many"}, "FARANDOLE_SIZE: must be a whole number >= 0, got 'many'"),
        ({"JOB_COMPLETION_INDEX": "-1"}, "JOB_COMPLETION_INDEX: must be a whole number >= 0, got '-1'"),
        ({"FARANDOLE_RENDEZVOUS": "train-0.train"}, "'train-0.train' is not host:port"),
    ],
)
def test_a_manifest_that_is_wrong(change: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        find_rendezvous(Config(), pod(1, 29400) | change)
    assert text in str(refused.value)


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigError, match="in use"):
        find_rendezvous(Config(), pod(0, other.getsockname()[1]))


def test_pods_that_do_not_train_together(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(find_rendezvous(Config(), {"JOB_COMPLETION_INDEX": "0"}), SoloRendezvous)
    assert caplog.records == []
    assert isinstance(find_rendezvous(Config(), {"JOB_COMPLETION_INDEX": "3"}), SoloRendezvous)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "this pod has index 3 of an Indexed Job, and trains alone" in record.getMessage()


def test_other_launchers_in_a_pod_come_first() -> None:
    ours = {"FARANDOLE_RANK": "1", "FARANDOLE_SIZE": "2", "FARANDOLE_RENDEZVOUS": "127.0.0.1:9"}
    met = find_rendezvous(Config(), {"JOB_COMPLETION_INDEX": "0", "FARANDOLE_SECRET": SECRET, **ours})
    assert (met.rank, met.address) == (1, "127.0.0.1:9")
    met.close()
    with pytest.raises(ConfigError, match="HOROVOD_SIZE"):
        find_rendezvous(Config(), pod(0, 29400, HOROVOD_SIZE="2"))


@pytest.mark.native
def test_the_program_of_the_manifest_trains() -> None:
    program = Path(__file__).parents[4] / "deploy" / "image" / "train.py"
    with free_port() as port, ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(
                subprocess.run,
                [sys.executable, str(program)],
                env={**os.environ, **pod(index, port, size=2)},
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
            )
            for index in range(2)
        ]
        done = [each.result() for each in runs]
    assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
    assert [each.stdout for each in done] == [f"rank {rank} of 2: the ranks add up to 1\n" for rank in range(2)]
