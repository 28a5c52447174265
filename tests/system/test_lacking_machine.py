"""Jobs on machines that lack something: each gets one sentence with a remedy, or runs all the same."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from namespaces import problem

from system.launched import command

pytestmark = [pytest.mark.native, pytest.mark.slow]

SUM = """
import farandole.numpy as hvd, numpy as np
hvd.init()
assert hvd.allreduce(np.ones(1000), op=hvd.Sum, name="x")[-1] == hvd.size()
print("summed")
"""
INIT = "import farandole.numpy as hvd; hvd.init()"

needs_namespaces = pytest.mark.skipif(bool(problem()), reason=problem() or "-")


def run(words: Sequence[str], *, shell: str = "", wrapper: Sequence[str] = (), **env: str) -> tuple[int, str]:
    """Run a command after `shell`'s commands; return its exit code and what it has said."""
    done = subprocess.run(
        [*wrapper, "bash", "-c", f'{shell or ":"}; exec "$@"', "bash", *words],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout


def ranks(program: str = SUM) -> list[str]:
    return command("run", "-np", "2", sys.executable, "-c", program)


@needs_namespaces
@pytest.mark.parametrize("program", ["launched", "threads"])
def test_a_loopback_with_version_6_alone_is_enough(program: str) -> None:
    alone = "ip link set lo up; ip address delete 127.0.0.1/8 dev lo"
    threads = """
from helpers.ranks import run_ranks
assert run_ranks(2, lambda context: context.size) == [2, 2]
print("summed summed")
"""
    words = ranks() if program == "launched" else [sys.executable, "-c", threads]
    tests = str(Path(__file__).parent.parent)
    code, said = run(words, shell=alone, wrapper=["unshare", "--net"], PYTHONPATH=tests)
    assert (code, said.count("summed")) == (0, 2), said


@needs_namespaces
def test_a_loopback_that_is_down_is_named() -> None:
    code, said = run(ranks(INIT), wrapper=["unshare", "--net"])
    assert code != 0
    assert said.startswith("farandole: interface: lo is down or has no address (")
    assert said.endswith("); run: ip link set lo up\n")
    assert said.count("\n") == 1, said


@needs_namespaces
def test_a_rendezvous_without_a_way_there_is_named() -> None:
    """A rank started by hand, whose host has lost its network."""
    place = {"FARANDOLE_RANK": "0", "FARANDOLE_SIZE": "2", "FARANDOLE_SECRET": "ab" * 32}
    words = [sys.executable, "-c", INIT]
    there = "10.255.255.1:5"
    code, said = run(words, wrapper=["unshare", "--net"], **place, FARANDOLE_RENDEZVOUS=there)
    assert code != 0
    last = said.splitlines()[-1]
    assert last.startswith("farandole.errors.RendezvousError: this host has no way there (Network is unreachable)")
    assert there in last


def test_a_rendezvous_at_an_unknown_host_is_named() -> None:
    place = {"FARANDOLE_RANK": "0", "FARANDOLE_SIZE": "2", "FARANDOLE_SECRET": "ab" * 32}
    there = {"FARANDOLE_RENDEZVOUS": "no-such-host.invalid:5", "FARANDOLE_START_TIMEOUT": "2"}
    code, said = run([sys.executable, "-c", INIT], **place, **there)
    assert code != 0
    last = said.splitlines()[-1]
    assert last.startswith("farandole.errors.RendezvousError: the host name no-such-host.invalid has no address here (")
    assert "no answer within 2 s" in last
    assert "(rendezvous at no-such-host.invalid:5)" in last


@pytest.mark.parametrize(
    ("interface", "problem"),
    [
        ("no-such", "farandole: interface: 'no-such' is neither an address nor one of lo"),
        (
            "203.0.113.7",
            "farandole.errors.ConfigError: interface: this rank cannot listen on 203.0.113.7 "
            "(Cannot assign requested address); name one of lo",
        ),
    ],
)
def test_an_interface_that_is_not_there_is_refused(interface: str, problem: str) -> None:
    code, said = run(ranks(INIT), FARANDOLE_INTERFACE=interface)
    assert code != 0
    assert problem in said


def test_a_folder_is_no_timeline() -> None:
    code, said = run(ranks(INIT), FARANDOLE_TIMELINE="/")
    assert code != 0
    assert "farandole.errors.ConfigError: timeline: / is a folder; name a file in it" in said
    assert "empty name" not in said


def test_a_folder_is_no_program(tmp_path: Path) -> None:
    code, said = run(command("run", "-np", "2", str(tmp_path)))
    assert code == 126
    assert said == f"farandole: cannot run '{tmp_path}': it is a folder; name a program in it\n"


def test_files_that_may_not_grow_are_named() -> None:
    """Shared memory is a file to the system."""
    code, said = run(ranks(INIT), shell="ulimit -f 0")
    assert code != 0
    assert "RendezvousError: the ranks of this host cannot have" in said
    assert "bytes of shared memory: File too large; raise the limit on the size of files (ulimit -f)" in said
    assert "please report this" not in said


def test_shared_memory_is_no_larger_than_needed() -> None:
    """Room for registered buffers, 4 GiB a rank, is made when the first of them is."""
    shared = """
from farandole.errors import InvalidRequest
try:
    hvd.empty_shared(1000)
except InvalidRequest as error:
    assert "shared memory cannot grow" in str(error) and "ulimit -f" in str(error), error
    print("refused")
"""
    code, said = run(ranks(SUM + shared), shell=f"ulimit -f {1 << 20}")  # KiB
    assert (code, said.count("summed"), said.count("refused")) == (0, 2, 2), said


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv (util-linux)")
def test_too_few_processes_are_named(tmp_path: Path) -> None:
    # Another user, as the limit does not bind root; who may read this folder all the same.
    user = ["setpriv", "--reuid=65533", "--regid=65533", "--clear-groups", "--inh-caps=+dac_override,+dac_read_search"]
    as_user = [*user, "--ambient-caps=+dac_override,+dac_read_search"]
    call = """
from farandole import run
def main():
    import farandole.numpy as hvd
    hvd.init()
if __name__ == "__main__":
    try:
        run(main, num_proc=2)
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0])
"""
    script = tmp_path / "call.py"
    script.write_text(call)
    for most in (2, 6, 9, 12):  # the launcher's threads, a guard, a rank's process, its threads
        words = [*as_user, "bash", "-c", f'ulimit -u {most}; exec "$@"', "bash", sys.executable, str(script)]
        _, said = run(words, HOME=str(tmp_path))
        assert said.splitlines()[-1].startswith(("ConfigError num_proc: ", "RankFailed rank ")), said
        assert "raise the limit on processes of this user (ulimit -u" in said.splitlines()[-1], said
