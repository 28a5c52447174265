"""Rendezvous of ranks that another launcher has started: at rank 0, told of by that launcher's means."""

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from farandole.config import Config
from farandole.errors import ConfigError, RendezvousError
from farandole.meeting import launched
from farandole.meeting.addresses import join_address
from farandole.meeting.frames import Deadline, encode
from farandole.meeting.launched import find_rendezvous, hosted, mpi_library
from farandole.meeting.launched.elastic import MemberEnvironment
from farandole.meeting.launched.hosted import HostedRendezvous, _Served, meet
from farandole.meeting.launched.mpi_library import find_library
from farandole.meeting.launched.operator import require_hosts
from farandole.meeting.launched.slurm import FolderExchange
from farandole.meeting.rendezvous import SoloRendezvous
from farandole.other_launchers import find_other_launch
from farandole.topology import own_addresses

LIMIT = timedelta(seconds=30)
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "2"}


class Board:
    """Exchange of ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.payload, self.written, self.closed = b"", threading.Event(), 0

    def of(self, rank: int) -> "BoardExchange":
        return BoardExchange(self, rank)


class BoardExchange:
    def __init__(self, board: Board, rank: int) -> None:
        self._board, self.rank, self.size = board, rank, board.size

    def share(self, payload: bytes, deadline: Deadline) -> bytes:
        if self.rank == 0:
            self._board.payload = payload
            self._board.written.set()
        assert self._board.written.wait(deadline.remaining())
        return self._board.payload

    def close(self) -> None:
        self._board.closed += 1


def all_meet(board: Board, config: Config | None = None) -> list[HostedRendezvous]:
    with ThreadPoolExecutor(board.size) as pool:
        deadline = Deadline(LIMIT)
        waiting = [pool.submit(meet, board.of(rank), config or Config(), deadline) for rank in range(board.size)]
    return [each.result() for each in waiting]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_meet_at_rank_0(size: int, caplog: pytest.LogCaptureFixture) -> None:
    board = Board(size)
    ranks = all_meet(board)
    assert {each.address for each in ranks} == {ranks[0].address}
    assert ranks[0].address is not None and ranks[0].address.startswith("127.0.0.1:")
    assert len({each.secret for each in ranks}) == 1 and len(ranks[0].secret) == 32
    assert all(len(each.hosts) == size and len(set(each.hosts)) == 1 for each in ranks)
    with ThreadPoolExecutor(size) as pool:
        calls = [pool.submit(each.allgather, bytes([each.rank]), timeout=LIMIT) for each in ranks]
    assert [call.result() for call in calls] == [[bytes([rank]) for rank in range(size)]] * size
    for each in reversed(ranks):
        each.close()
        each.close()
    assert board.closed == 1
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []


def test_ranks_meet_at_the_interface_that_is_named() -> None:
    ranks = all_meet(Board(2), Config(interface="127.0.0.1"))
    assert len(ranks[0]._addresses) == 1
    for each in ranks:
        each.close()


def test_ranks_that_reach_rank_0_by_different_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    def reachable(addresses: list[str], rank: int, *rest: object) -> list[str]:
        return addresses if rank == 0 else addresses[rank - 1 : rank]

    monkeypatch.setattr(hosted, "own_addresses", lambda: ["127.0.0.1", "127.0.0.2"])
    monkeypatch.setattr(hosted, "_reachable", reachable)
    with pytest.raises(
        RendezvousError, match=r"FARANDOLE_INTERFACE \(rank 0 at 127.* and 127.*; rank 1 at 127\.0\.0\.1:"
    ):
        all_meet(Board(3))


def test_a_rank_that_does_not_reach_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        closed = join_address(*other.getsockname())
    board = Board(2)
    board.payload = encode(_Served(bytes(32), [closed]))
    board.written.set()
    with pytest.raises(RendezvousError, match=f"rank 1 on {socket.gethostname()} reaches rank 0 at none .*{closed}"):
        meet(board.of(1), Config(), Deadline(LIMIT))


def test_a_rank_that_hears_of_rank_0_at_the_last_moment() -> None:
    class Late(BoardExchange):
        def share(self, payload: bytes, deadline: Deadline) -> bytes:
            return self._board.payload

    board = Board(2)
    board.payload = encode(_Served(bytes(32), ["127.0.0.1:9"]))
    with pytest.raises(RendezvousError, match=r"rank 1 .* too late .*no answer within 0 s.*FARANDOLE_START_TIMEOUT"):
        meet(Late(board, 1), Config(), Deadline(timedelta(0)))


def test_own_addresses_can_be_bound() -> None:
    found = own_addresses()
    assert found[0] in ("127.0.0.1", "::1") and len(set(found)) == len(found)
    for address in found:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        socket.create_server((address, 0), family=family).close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shared" / "deep"


def task(rank: int, folder: Path) -> FolderExchange:
    return FolderExchange({**SLURM, "SLURM_PROCID": str(rank)}, 2, str(folder))


def test_tasks_of_srun_share_a_file_that_nobody_else_reads(folder: Path) -> None:
    first, second = task(0, folder), task(1, folder)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.share, b"", Deadline(LIMIT))
        assert first.share(b"card", Deadline(LIMIT)) == b"card"
        assert waiting.result() == b"card"
    (file,) = folder.iterdir()
    assert file.name == "slurm-7-3-0" and file.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    # Two clusters with a job of that number may share the folder.
    elsewhere = FolderExchange(SLURM | {"SLURM_PROCID": "0", "SLURM_CLUSTER_NAME": "two"}, 2, str(folder))
    elsewhere.share(b"other", Deadline(LIMIT))
    assert second.share(b"", Deadline(LIMIT)) == b"card"
    elsewhere.close()
    first.close()
    assert list(folder.iterdir()) == []


def test_a_file_that_others_can_read_is_refused(folder: Path) -> None:
    task(0, folder).share(b"card", Deadline(LIMIT))
    next(folder.iterdir()).chmod(0o640)
    with pytest.raises(RendezvousError, match="can be read by others"):
        task(1, folder).share(b"", Deadline(LIMIT))


def test_a_file_that_cannot_be_opened_is_refused(folder: Path) -> None:
    task(0, folder).share(b"card", Deadline(LIMIT))
    (file,) = folder.iterdir()
    file.rename(folder / "other")
    file.symlink_to(folder / "other")
    with pytest.raises(RendezvousError, match=r"slurm-7-3-0 cannot be read: Too many levels of symbolic links"):
        task(1, folder).share(b"", Deadline(LIMIT))


def test_a_file_that_is_replaced_during_the_read_is_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS then reports a stale handle."""
    task(0, folder).share(b"card", Deadline(LIMIT))
    answers = iter([OSError(errno.ESTALE, "Stale file handle"), None])

    def stale_once(path: Path, flags: int, open: Callable[[Path, int], int] = os.open) -> int:
        error = next(answers)
        if error is not None:
            raise error
        return open(path, flags)

    monkeypatch.setattr(os, "open", stale_once)
    assert task(1, folder).share(b"", Deadline(LIMIT)) == b"card"


def test_a_folder_that_hosts_do_not_share(folder: Path) -> None:
    with pytest.raises(RendezvousError, match=r"rank 0 did not write .*slurm-7-3-0; .*FARANDOLE_RENDEZVOUS_FOLDER"):
        task(1, folder).share(b"", Deadline(timedelta(seconds=0.2)))


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="rendezvous_folder: cannot write "):
        task(0, tmp_path / "file" / "folder").share(b"card", Deadline(LIMIT))


def test_a_task_without_a_number() -> None:
    with pytest.raises(ConfigError, match="SLURM_PROCID: must be a task's number below 2, got ''"):
        FolderExchange(SLURM, 2, None)


def test_a_process_without_a_launcher_is_alone() -> None:
    assert isinstance(find_rendezvous(Config(), {}), SoloRendezvous)


def test_a_launch_whose_processes_cannot_meet_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="HOROVOD_SIZE: is 2: a launcher of Horovod started 2 processes, which cannot"
    ):
        find_rendezvous(Config(), {"HOROVOD_SIZE": "2"})


def test_processes_of_mpirun_are_no_member_of_an_elastic_job() -> None:
    """Each of them would take the member's place, and train alone."""
    member = MemberEnvironment(number=0, launcher="127.0.0.1:1", secret=b"outer").write()
    with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_SIZE: is 2: mpirun of Open MPI started 2 processes"):
        find_rendezvous(Config(), member | {"OMPI_COMM_WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("hosts", "local_rank", "warns"),
    [
        ("aa", "1", False),
        ("ab", "1", True),
        ("ab", "0", False),
        ("ab", "", False),
        ("", "1", False),
        ("aa", "0", False),
    ],
)
def test_containers_that_hide_ranks_of_their_machine_are_named(
    hosts: str, local_rank: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise all ranks of the machine would take its first GPU."""
    met = HostedRendezvous(["127.0.0.1:1"], 1, 2, b"secret", None)
    met.hosts = list(hosts)
    monkeypatch.setattr(launched, "_load", lambda found: lambda *_: met)
    env = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": local_rank}
    assert find_rendezvous(Config(), env) is met
    assert ("rank 1 has local_rank() 0, but SLURM_LOCALID=1: its container shares" in caplog.text) == warns


@pytest.fixture
def launcher_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A launcher that this process does not have, without a library in memory."""
    monkeypatch.setattr(mpi_library, "_folders_of_launcher", lambda: [tmp_path])
    monkeypatch.setattr(mpi_library, "_mapped", lambda process: [])
    yield tmp_path


def test_the_library_is_the_launchers_own(launcher_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = ({name: "2"} for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
    open_mpi, mpich = find_other_launch(ours), find_other_launch(theirs)
    assert open_mpi is not None and mpich is not None
    for name in ("libmpi.so.12", "libmpi.so.40"):
        (launcher_folder / name).touch()
    assert find_library(open_mpi, None) == str(launcher_folder / "libmpi.so.40")
    assert find_library(mpich, None) == str(launcher_folder / "libmpi.so.12")
    assert find_library(mpich, "mine.so") == "mine.so"
    monkeypatch.setattr(
        mpi_library, "_mapped", lambda process: [Path("/lib/libc.so.6"), Path("/opt/libmpi.so.40.30.4")]
    )
    assert find_library(mpich, None) == "/opt/libmpi.so.40.30.4"  # the program has chosen it


def test_a_launcher_without_a_library(launcher_folder: Path) -> None:
    found = find_other_launch({"PMI_SIZE": "2"})
    assert found is not None
    found = replace(found, launcher=replace(found.launcher, mpi=("libnone.so.1",)))
    with pytest.raises(
        ConfigError, match=r"PMI_SIZE: is 2: .* no MPI library \(libnone\.so\.1\).*FARANDOLE_MPI_LIBRARY"
    ):
        find_library(found, None)


def test_open_mpi_5_that_starts_all_ranks_of_an_operators_job_on_one_host(tmp_path: Path) -> None:
    file = tmp_path / "hostfile"
    file.write_text("job-worker-0.job.ns.svc slots=2\njob-worker-1.job.ns.svc slots=2\n")
    env = {"K_MPI_JOB_ROLE": "launcher", "OMPI_MCA_orte_default_hostfile": str(file)}
    one, two = ["a"] * 4, ["a", "a", "b", "b"]
    with pytest.raises(ConfigError, match=r"names 2 hosts in .*all 4 ranks on one: .*PRTE_MCA_prte_default_hostfile=/"):
        require_hosts(env, 4, one)
    require_hosts(env, 4, two)
    require_hosts(env, 2, one[:2])  # they fit on one host
    require_hosts({"OMPI_MCA_orte_default_hostfile": str(file)}, 4, one)
    require_hosts({**env, "OMPI_MCA_orte_default_hostfile": str(tmp_path / "none")}, 4, one)
    trainer = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "OMPI_MCA_orte_default_hostfile": str(file)}
    with pytest.raises(ConfigError, match="names 2 hosts"):
        require_hosts(trainer, 4, one)


@pytest.mark.parametrize("size", ["1", "2"])
@pytest.mark.parametrize("sign", [{"K_MPI_JOB_ROLE": "launcher"}, {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}])
def test_open_mpi_5_that_starts_ranks_in_a_launcher_that_is_no_worker(
    tmp_path: Path, size: str, sign: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher with one core gets one rank, which would train alone."""
    file = tmp_path / "hostfile"
    file.write_text("job-worker-0.invalid slots=2\njob-worker-1.invalid slots=2\n")
    env = {**sign, "OMPI_MCA_orte_default_hostfile": str(file), "OMPI_COMM_WORLD_SIZE": size}
    text = (
        "names 2 hosts in .*, but mpirun has started ranks on job-launcher, which is none of them: Open MPI 5 ignores"
    )
    monkeypatch.setattr(socket, "gethostname", lambda: "job-launcher")
    with pytest.raises(ConfigError, match=text):
        find_rendezvous(Config(), env)
    if size == "1":
        alone = {name: value for name, value in env.items() if name != "OMPI_COMM_WORLD_SIZE"}
        assert isinstance(find_rendezvous(Config(), alone), SoloRendezvous)  # a process that no mpirun has started
        for name in ("job-worker-1", "node"):
            monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
            file.write_text("job-worker-0.invalid slots=2\njob-worker-1.invalid slots=2\nlocalhost slots=1\n")
            assert isinstance(find_rendezvous(Config(), env), SoloRendezvous)  # a pod has its node's name sometimes


def test_a_folder_of_another_user_is_not_read(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    task(0, folder).share(b"card", Deadline(LIMIT))
    os.chown(next(folder.iterdir()), 12345, 12345)
    with pytest.raises(RendezvousError, match="belongs to another user"):
        task(1, folder).share(b"", Deadline(LIMIT))
