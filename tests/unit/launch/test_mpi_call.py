"""`horovod.run(use_mpi=True)`: a function on ranks that mpirun starts, here by a stand-in that starts processes."""

import os
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from farandole.compat.launching import run
from farandole.errors import ConfigError, RankFailed, RendezvousError, SlotsError
from farandole.launch import mpi_worker
from farandole.launch.mpi_call import LAST_WORDS, _Calls
from farandole.launch.processes import RankProcess
from farandole.meeting.acceptor import Admitted

# Starts the words from Python on, once for each rank, and ends all of them a moment after the last one has failed.
MPIRUN = f"""#!/bin/sh
if [ "$1" = --version ]; then echo "mpirun (Open MPI) 4.1.4"; exit; fi
echo "$@" > words
while [ "$1" != {sys.executable} ]; do
    if [ "$1" = -np ]; then ranks=$2; fi
    if [ "$1" = --short ]; then ranks=$((ranks - 1)); fi
    if [ "$1" = --refused ]; then echo "no such option" >&2; exit 3; fi
    shift
done
rank=0
while [ $rank -lt $ranks ]; do
    OMPI_COMM_WORLD_RANK=$rank "$@" &
    processes="$! $processes"; rank=$((rank + 1))
done
code=0
for process in $processes; do wait $process || {{ code=$?; sleep 0.3; kill $processes 2>/dev/null; }}; done
exit $code
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose mpirun only starts processes."""
    (tmp_path / "mpirun").write_text(MPIRUN)
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rank() -> int:
    return int(os.environ["OMPI_COMM_WORLD_RANK"])


def show(text: str, *, end: str) -> tuple[int, str, bool]:
    sys.stdout.write("shown\n")  # in one piece, unlike print(): the other rank writes to the same pipe
    sys.stdout.flush()
    return rank(), text + end, mpi_worker.SECRET in os.environ


def fail() -> None:
    if rank() == 1:
        raise LookupError("no such thing")
    threading.Event().wait(60)


def end() -> None:
    if rank() == 1:
        os._exit(7)
    threading.Event().wait(60)


def test_each_rank_returns_its_value(site: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """mpirun gets its words; ranks do not see the secret, which stands in no argument."""
    values = run(show, ("a",), {"end": "b"}, num_proc=2, use_mpi=True, mpi_args="--mca x 'y z'", ssh_port=12345)
    assert values == [(0, "ab", False), (1, "ab", False)]
    assert capfd.readouterr().out == "shown\n" * 2
    words = (site / "words").read_text()
    assert words.startswith(
        "--allow-run-as-root --tag-output -np 2 -H localhost:2 --bind-to none --map-by slot --mca x"
    )
    assert "--mca plm_rsh_args -p 12345" in words and f"-x {mpi_worker.SECRET}" in words


class Unreadable:
    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


def test_a_value_that_cannot_be_unpickled_names_its_rank(site: Path) -> None:
    with pytest.raises(RankFailed, match=r"rank 0 failed: returned a value that cannot be unpickled here \(V"):
        run(Unreadable, num_proc=1, use_mpi=True)


def test_many_ranks_without_an_outcome_wait_for_mpirun_once() -> None:
    """A host is lost, and mpirun does not end."""
    waits: list[timedelta] = []
    mpirun = cast(RankProcess, SimpleNamespace(wait=waits.append, tail=("last",)))
    with _Calls(3, [socket.create_server(("127.0.0.1", 0))], bytes(32), b"call") as calls:
        for rank in (2, 0, 1):
            calls._events.put((rank, None))
        with pytest.raises(RankFailed, match="rank 2 failed: ended before its function returned"):
            calls.values(mpirun, timedelta(seconds=30))
    assert waits == [LAST_WORDS, timedelta(0), timedelta(0)]


def test_a_rank_without_a_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with _Calls(1, [socket.create_server(("127.0.0.1", 0))], bytes(32), b"call") as calls, socket.socket() as peer:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RendezvousError, match="raise the limit on processes of this user"):
            calls._admit(Admitted(peer, b"0", "there"))
        assert calls._connections == {}  # so the launcher does not wait for it without a limit


def test_words_for_mpirun_alone_mean_it(site: Path) -> None:
    assert run(rank, num_proc=1, mpi_args="-q", output_filename=site / "logs") == [0]
    assert f"--output-filename {site}/logs" in (site / "words").read_text() and (site / "logs").is_dir()
    with pytest.raises(RankFailed, match="KeyError"):
        run(rank, num_proc=1, mpi_args="-q", use_gloo=True)  # without mpirun, and its variable


@pytest.mark.parametrize(
    ("function", "options", "sentence", "cause"),
    [
        (fail, "", "rank 1 failed: LookupError: no such thing", LookupError),
        (end, "", "rank 1 failed: ended before its function returned", type(None)),
        (
            rank,
            "--refused",
            r"rank 0 failed: did not start: mpirun exited with code 3(?s:.*)no such option",
            type(None),
        ),
        (rank, "--short", "rank 1 failed: did not start: mpirun exited with code 0", type(None)),
    ],
)
def test_the_rank_that_failed_first_is_named(
    site: Path, function: "type[object]", options: str, sentence: str, cause: type
) -> None:
    with pytest.raises(RankFailed, match=sentence) as raised:
        run(function, num_proc=2, use_mpi=True, mpi_args=options)
    assert isinstance(raised.value.__cause__, cause)


def test_ranks_that_do_not_start_are_named(site: Path) -> None:
    (site / "mpirun").write_text(MPIRUN.replace("rank=0", "sleep 60"))
    with pytest.raises(RendezvousError, match=r"mpirun has not started all ranks within 0.2 s.*missing: ranks 0 and 1"):
        run(rank, num_proc=2, use_mpi=True, start_timeout=0.2)


def test_what_cannot_be_is_refused(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SlotsError, match="3 ranks need 3 slots"):
        run(rank, num_proc=3, use_mpi=True, hosts="localhost:2")
    with pytest.raises(ConfigError, match="give hosts or a hostfile, not both"):
        run(rank, num_proc=1, use_mpi=True, hosts="localhost:2", hostfile="f")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="no mpirun is in a directory of PATH"):
        run(rank, num_proc=1, use_mpi=True)


def test_a_process_without_a_rank_says_so() -> None:
    assert mpi_worker.rank_of({"PMI_RANK": "3"}) == 3
    assert mpi_worker.rank_of({"PMI_ID": "1", "PMI_PORT": "a:1"}) == 1
    with pytest.raises(ConfigError, match=r"mpirun has set none of OMPI_.* PMI_RANK, PMI_ID, PMIX_RANK"):
        mpi_worker.rank_of({})
