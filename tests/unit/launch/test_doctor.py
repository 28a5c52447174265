"""`farandole doctor`: facts, rounds of pairs, problems, tables."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import pytest

from farandole.launch import cli
from farandole.launch.doctor import facts as facts_module
from farandole.launch.doctor import libraries
from farandole.launch.doctor.facts import Fact, examine
from farandole.launch.doctor.pairs import Link, Report, _measure, rounds_of
from farandole.launch.doctor.report import Diagnosis
from farandole.meeting.addresses import join_address
from farandole.meeting.rendezvous import SoloRendezvous


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One framework, and no library: the others take seconds."""
    monkeypatch.setattr(facts_module, "FRAMEWORKS", facts_module.FRAMEWORKS[:1])


def value_of(facts: list[Fact], name: str) -> Fact:
    (found,) = [each for each in facts if each.name == name]
    return found


def test_facts_of_this_machine(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = examine()
    assert [fact for fact in facts if fact.problem] == []
    assert value_of(facts, "native core").value.endswith(".so")
    assert value_of(facts, "NumPy").value.endswith(", the binding loads")
    assert sys.executable in value_of(facts, "Python").value
    assert value_of(facts, "addresses").value.startswith(("127.0.0.1", "::1"))
    assert {"farandole", "frameworks", "libraries", "launchers", "machine"} == {fact.topic for fact in facts}


def test_a_binding_that_does_not_load(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "raise ImportError('no such symbol')"
    monkeypatch.setattr(facts_module, "FRAMEWORKS", [("numpy", "NumPy", program), ("nowhere", "Nothing", program)])
    facts = examine()
    assert value_of(facts, "NumPy").problem == "the binding does not load: ImportError: no such symbol"
    assert value_of(facts, "Nothing").value == "not installed"
    assert value_of(examine(load=False), "NumPy").problem == ""


def test_what_a_machine_lacks(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    most = {resource.RLIMIT_NOFILE: 256, resource.RLIMIT_FSIZE: 1000}
    monkeypatch.setattr(resource, "getrlimit", lambda number: (most.get(number, resource.RLIM_INFINITY), 0))
    monkeypatch.setattr(facts_module, "program_path", lambda name: None)
    full = types.SimpleNamespace(f_frsize=4096, f_blocks=16384, f_bavail=100)
    monkeypatch.setattr(os, "statvfs", lambda folder: full)
    facts = examine(load=False)
    problems = {fact.name: fact.problem for fact in facts if fact.problem}
    assert problems == {
        "ssh": "ranks cannot be started on other hosts; install OpenSSH's client",
        "/dev/shm": "loaders of PyTorch need more; with Docker: --shm-size=1g",
        "open files (ulimit -n)": "large jobs need more; ulimit -n 1024",
        "file size (ulimit -f)": "it limits the ranks' shared memory, too; ulimit -f unlimited",
    }


@pytest.mark.parametrize(
    ("prints", "value", "is_problem"),
    [
        ('openjdk version "17.0.15" 2025-04-15', "17.0.15 ({home}/bin/java)", False),
        ('openjdk version "26" 2026-03-17', "26 ({home}/bin/java)", False),
        ('java version "1.8.0_392"', "1.8.0_392 ({home}/bin/java)", True),
        ("Error: could not find libjava.so", "{home}/bin/java", True),
        (None, "not found in {home}/bin (JAVA_HOME)", True),
    ],
)
def test_the_java_that_spark_would_start(
    prints: str | None, value: str, is_problem: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyspark")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    if prints is not None:
        program.write_text(f"#!/bin/sh\necho '{prints}' >&2\n")
        program.chmod(0o755)
    fact = facts_module._java()
    assert (fact.value, bool(fact.problem)) == (value.format(home=tmp_path), is_problem)


def test_libraries_by_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "LIBRARIES", {"C": ("libnone.so.1", "libc.so.6"), "none": ("libnone.so.1",)})
    ((title, (path, about)),) = libraries.find_libraries().items()
    assert title == "C" and Path(path).is_file() and Path(path).name.startswith("libc") and about == ""


TALKATIVE = """
import ctypes
libc = ctypes.CDLL(None)
class Library(ctypes.CDLL):
    def __init__(self, *words, **options):
        print('hello')
        libc.printf(b'hello')
        super().__init__(*words, **options)
ctypes.CDLL = Library
"""


def test_libraries_that_print_while_they_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first in Python; native code buffers its line until the process ends."""
    (tmp_path / "sitecustomize.py").write_text(TALKATIVE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert [fact.name for fact in facts_module._libraries()] == list(libraries.LIBRARIES)


def test_two_libraries_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may have another number than the name by which it was loaded, as that of CUDA's driver has."""
    files = ("/lib/libmpi.so.40.30.4", "/opt/libmpi.so.12.0.5", "/lib/libcuda.so.535.54")
    maps = "".join(f"7f00-7f01 r-xp 00000000 08:01 7 {file}\n" for file in files)
    monkeypatch.setattr(Path, "read_text", lambda self, **options: maps)
    names = ("libmpi.so.40", "libmpi.so.12", "libcuda.so.1", "libnone.so.1")
    assert [libraries._file_of(name) for name in names] == [*files, "libnone.so.1"]


DRIVER = """
int cuInit(unsigned flags) { return RESULT; }
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuGetErrorName(int code, const char **text) { *text = "CUDA_ERROR_NO_DEVICE"; return 0; }
int cuGetErrorString(int code, const char **text) { *text = "no CUDA-capable device is detected"; return 0; }
int cuDeviceGetCount(int *count) { *count = 3; return 0; }
int ncclGetVersion(int *version) { *version = NCCL; return 0; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) for stand-ins")
@pytest.mark.parametrize(
    ("result", "version", "about", "nccl_version", "about_nccl"),
    [
        (0, 12080, "CUDA 12.8, 3 devices", 22705, "2.27.5"),
        (
            0,
            10020,
            "CUDA 10.2, 3 devices; tensors on GPUs need CUDA 11.0 or later",
            21403,
            "2.14.3; ranks use NCCL from 2.18 on",
        ),
        (
            100,
            12080,
            "no device can be used: CUDA_ERROR_NO_DEVICE (100), no CUDA-capable device is detected",
            23203,
            "2.32.3",
        ),
    ],
)
def test_nvidias_libraries_in_packages(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    result: int,
    version: int,
    about: str,
    nccl_version: int,
    about_nccl: str,
) -> None:
    """Libraries with NVIDIA's names stand in for a driver that this machine may lack."""
    folder = tmp_path / "nvidia" / "each" / "lib"
    folder.mkdir(parents=True)
    cuda, nccl = f"libfakecuda{result}of{version}.so.1", f"libfakenccl{result}of{version}.so.2"
    for name in (cuda, nccl):
        values = (f"-DRESULT={result}", f"-DVERSION={version}", f"-DNCCL={nccl_version}")
        words = ["cc", "-shared", "-fPIC", *values, "-x", "c", "-o", str(folder / name), "-"]
        subprocess.run(words, input=DRIVER, text=True, check=True, timeout=60)
    names = {"CUDA driver": (cuda,), "NCCL": (nccl,)}
    monkeypatch.setattr(libraries, "LIBRARIES", names)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert libraries.find_libraries() == {
        "CUDA driver": (str(folder / cuda), about),
        "NCCL": (str(folder / nccl), about_nccl),
    }


@pytest.mark.parametrize("count", range(1, 9))
def test_each_pair_has_its_turn_and_no_host_two_at_once(count: int) -> None:
    rounds = rounds_of(count)
    pairs = [pair for each in rounds for pair in each]
    assert sorted(pairs) == [(high, low) for high in range(count) for low in range(high)]
    for each in rounds:
        hosts = [host for pair in each for host in pair]
        assert len(hosts) == len(set(hosts))


def test_a_host_that_cannot_be_reached_is_a_problem_of_its_pair() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        closed = join_address(*other.getsockname())
    link = _measure(SoloRendezvous(), 7, closed)
    assert link.problem == f"nothing passes to {closed}: [Errno 111] Connection refused"
    assert (link.here, link.there) == (0, 7)


def report_of(version: str, *links: Link, problem: str = "") -> Report:
    return Report([Fact("farandole", "version", version), Fact("machine", "cores", "2", problem)], list(links))


def test_problems_and_tables() -> None:
    link = Link(0, 1, latency=2e-4, clock=-3.04, out=1.17e8, back=1.2e8)
    broken = Link(0, 2, problem="nothing passes to 10.0.0.1:5: timed out")
    reports = [report_of("1.0"), report_of("1.1", link, problem="too few"), report_of("1.0", broken)]
    diagnosis = Diagnosis.of(["a", "b", "c"], {"d": "Permission denied"}, reports)
    assert diagnosis.problems() == [
        "d cannot be used: Permission denied",
        "b: cores: too few",
        "b and a: their clocks differ by 3.0 s; let both follow a time server",
        "c and a: nothing passes to 10.0.0.1:5: timed out",
        "farandole version differs between hosts (a: 1.0, b: 1.1, c: 1.0); install the same",
    ]
    text = diagnosis.as_text()
    assert "  ! cores    2\n" in text
    assert "    between  and  round trip  clock ahead  MB/s there  MB/s back\n" in text
    assert "    b        a    200 us      -3040.0 ms   117         120\n" in text
    assert "  ! c and a: nothing passes" in text
    assert text.endswith("  farandole version differs between hosts (a: 1.0, b: 1.1, c: 1.0); install the same\n")
    whole = json.loads(diagnosis.as_json())
    assert whole["problems"] == diagnosis.problems()
    assert whole["links"][0] == {
        **{"here": "b", "there": "a", "problem": "", "latency": 2e-4, "clock": -3.04},
        **{"out": 1.17e8, "back": 1.2e8},
    }
    assert Diagnosis.of(["a"], {}, [report_of("1.0")]).as_text().endswith("\n\nno problems\n")


def test_the_command(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(("doctor", "--json", "--fast")) == 0
    assert list(json.loads(capsys.readouterr().out)["hosts"]) == ["this machine"]
    assert cli.main(("doctor", "-H", "a:0")) == 2
    assert cli.main(("doctor", "-H", "localhost", "--network-interface", "none0")) == 2


def test_hosts_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\necho no entry for you >&2\nexit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    words = ("doctor", "-H", "a.invalid:2,b.invalid", "--ssh-command", str(tmp_path / "ssh"))
    assert cli.main(words) == 1
    assert capsys.readouterr().out == (
        "problems\n  a.invalid cannot be used: no entry for you\n  b.invalid cannot be used: no entry for you\n"
    )
