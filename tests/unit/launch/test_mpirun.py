"""The command line of the site's mpirun, as `--mpi` makes it."""

import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.compat.horovodrun import make_parser, run_commandline
from farandole.compat.mpirun import main as stand_in
from farandole.errors import ConfigError, SlotsError
from farandole.launch.mpirun import Asked, Launcher, command_of, is_asked, prepare
from farandole.launch.options import Given

SAYS = {
    "Open MPI": "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/",
    "Debian's Open MPI": "mpirun.openmpi (OpenRTE) 4.1.4",
    "MPICH": "HYDRA build details:\n    Version:                                 4.0.2",
    "Intel MPI": "Intel(R) MPI Library for Linux* OS, Version 2021.19.0 Build 20260929 (id: 1821d9b)",
}
OPEN_MPI_4, OPEN_MPI_5 = (Launcher("/opt/bin/mpirun", "mpirun", "Open MPI", version) for version in (4, 5))
MPICH, INTEL = Launcher("/opt/bin/mpiexec", "mpiexec", "MPICH", 4), Launcher("/i/mpirun", "mpirun", "Intel MPI", 2021)
PROGRAM = ["python", "train.py"]


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def asked(*words: str, env: dict[str, str] | None = None) -> Asked:
    given = make_parser().parse_args([*words, *PROGRAM], namespace=Given())
    assert is_asked(given)
    return Asked.of(given, given.hosts, given.settings.get("interface"), env or {})


def line(launcher: Launcher, *words: str, env: dict[str, str] | None = None) -> str:
    return " ".join(command_of(launcher, asked("--mpi", "-np", "4", *words), PROGRAM, env or {})[0])


def test_the_line_of_horovod_for_open_mpi() -> None:
    variables = {"PATH": "/bin", "HOROVOD_FUSION_THRESHOLD": "1", "HOSTNAME": "h", "BASH_FUNC_f%%": "()", "PWD": "/"}
    variables |= {"FARANDOLE_SECRET": "s", "OMPI_MCA_btl": "tcp"}
    assert line(OPEN_MPI_4, "-H", "h1:2,h2:2", env=variables) == (
        "mpirun --allow-run-as-root --tag-output -np 4 -H h1:2,h2:2 --bind-to none --map-by slot "
        "-x HOROVOD_FUSION_THRESHOLD -x PATH python train.py"
    )


def test_what_users_add_stands_in_the_line_of_open_mpi() -> None:
    words = [
        "-H",
        "h1:4",
        "-p",
        "2222",
        "-i",
        "/my key",
        "--binding-args",
        "--map-by ppr:2:socket",
        "--output-filename",
    ]
    words += ["logs", "--mpi-args=-mca a 'b c'", "--network-interfaces", "eth0,ib0", "--tcp"]
    words += ["-prefix-timestamp", "--ssh-command", "ssh -F /my/config"]
    common = (
        "--map-by ppr:2:socket -mca a b c --mca plm_{0}_agent ssh -F /my/config "
        "--mca plm_{0}_args -p 2222 -i '/my key' "
        "--mca pml ob1 --mca btl ^openib,ofi,uct,usnic --mca coll ^hcoll,ucc --mca btl_tcp_if_include eth0,ib0 "
        "python train.py"
    )
    assert line(OPEN_MPI_4, *words) == (
        "mpirun --allow-run-as-root --tag-output --timestamp-output --output-filename logs -np 4 -H h1:4 "
        + common.format("rsh")
    )
    assert line(OPEN_MPI_5, *words) == (
        "mpirun --allow-run-as-root --output tag,timestamp,dir=logs -np 4 -H h1:4 " + common.format("ssh")
    )
    assert "--bind-to core --map-by slot" in line(OPEN_MPI_4, "--binding", "cores")


def test_open_mpi_connects_to_many_hosts_itself() -> None:
    hosts = ",".join(f"h{number}:1" for number in range(64))
    assert "--mca plm_rsh_no_tree_spawn true --mca plm_rsh_num_concurrent 64" in line(OPEN_MPI_4, "-H", hosts)
    assert "no_tree_spawn" not in line(OPEN_MPI_4, "-H", hosts.rpartition(",")[0])


def test_the_lines_of_hydra() -> None:
    assert line(MPICH, "-H", "h1:3,h2:1") == "mpiexec -prepend-rank -genvall -np 4 -hosts h1:3,h2:1 python train.py"
    assert line(INTEL, "-H", "h1:2,h2:2", "--mpi-args=-iface ib0") == (
        "mpirun -l -genvall -np 4 -ppn 2 -hosts h1,h2 -iface ib0 python train.py"
    )
    assert "-outfile-pattern logs/rank.%r.stdout" in line(MPICH, "--output-filename", "logs")
    assert "-prepend-timestamp" in line(INTEL, "-prefix-timestamp")
    ssh = ["-p", "2222", "--ssh-command", "/my/ssh -F config", "--binding", "cores", "--tcp"]
    told, added = command_of(MPICH, asked("--mpi", "-np", "1", *ssh), PROGRAM, {})
    assert " ".join(told[7:-2]) == "-bind-to core -launcher ssh -launcher-exec /my/ssh"
    tcp = {"FI_PROVIDER": "tcp", "UCX_TLS": "self,sm,tcp"}
    assert added == {"HYDRA_LAUNCHER_EXTRA_ARGS": "-F config -p 2222", **tcp}
    told, added = command_of(INTEL, asked("--mpi", "-np", "1", "-i", "key"), PROGRAM, {})
    assert "-bootstrap ssh -bootstrap-exec" in " ".join(told)
    assert added == {"I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": "-i key"}


@pytest.mark.parametrize(
    ("launcher", "words", "sentence"),
    [
        (MPICH, ["-prefix-timestamp"], "mpiexec of MPICH has no time before a line"),
        (INTEL, ["-H", "h1:3,h2:1"], "Intel MPI needs equally many slots on each host"),
    ],
)
def test_what_a_launcher_cannot_do_is_refused(launcher: Launcher, words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        line(launcher, *words)


def test_where_the_ranks_run(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("h1 slots=3\nh2 slots=1\n")
    assert "-H h1:3,h2:1" in line(OPEN_MPI_4, "--hostfile", str(file))
    assert "-H localhost:4" in line(OPEN_MPI_4)
    assert asked("--mpi", "-np", "4", env={"SLURM_JOB_ID": "7"}).hosts == ()  # mpirun knows them
    with pytest.raises(SlotsError):
        line(OPEN_MPI_4, "-H", "h1:3")


def test_mpirun_within_a_rank_does_not_hand_on_its_place(tmp_path: Path) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\necho '{SAYS['Open MPI']}'\n")
    mpirun.chmod(0o755)
    place = {"FARANDOLE_RANK": "0", "FARANDOLE_SIZE": "1", "FARANDOLE_SECRET": "00", "FARANDOLE_MEMBER": "2"}
    env = prepare(asked("--mpi", "-np", "2"), ["true"], {"PATH": str(tmp_path), "MINE": "x", **place}, "auto")[2]
    assert env["MINE"] == "x" and not env.keys() & place.keys()


@pytest.mark.parametrize("name", SAYS)
def test_launchers_are_known_by_what_they_say(name: str, tmp_path: Path) -> None:
    mpiexec = tmp_path / ("mpirun" if "Open" in name else "mpiexec")
    mpiexec.write_text(f"#!/bin/sh\necho '{SAYS[name]}'\n")
    mpiexec.chmod(0o755)
    flavour = "Open MPI" if "Open" in name else name
    versions = {"Open MPI": 5, "Debian's Open MPI": 4, "MPICH": 4, "Intel MPI": 2021}
    found = Launcher.find({"PATH": str(tmp_path)})
    assert found == Launcher(str(mpiexec), mpiexec.name, flavour, versions[name])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            "echo mpirun of mine",
            "mpirun --version says 'mpirun of mine', which is neither Open MPI, MPICH nor Intel MPI",
        ),
        ("exit 3", "mpirun --version says ''"),
        ("echo 'mpirun (farandole) 0.1.0, which needs no MPI'", "is farandole's stand-in for mpirun, without MPI"),
    ],
)
def test_other_launchers_are_refused(said: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\n{said}\n")
    (tmp_path / "mpirun").chmod(0o755)
    with pytest.raises(ConfigError) as raised:
        Launcher.find({"PATH": str(tmp_path)})
    assert sentence in str(raised.value)


def test_the_stand_in_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert stand_in(["--version"]) == 0
    assert capsys.readouterr().out.startswith("mpirun (farandole)")


def test_without_mpirun_the_command_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_commandline(["--mpi", "-np", "2", *PROGRAM]) == 2
    assert f"mpi: no mpirun is in a directory of PATH ({tmp_path}). Install Open MPI, MPICH or Intel MPI" in caplog.text
    assert "leave --mpi out" in caplog.text


@pytest.mark.parametrize(
    ("words", "by_mpirun"),
    [
        ([], False),
        (["--gloo"], False),
        (["--mpi"], True),
        (["--mpi-args=-x A"], True),
        (["--binding-args=-bind-to core"], True),
        (["--gloo", "--mpi-args=-x A"], False),
        (["--config-file", "FILE"], True),
        (["--config-file", "FILE", "--gloo"], False),
        (["--gloo", "--config-file", "FILE"], False),
    ],
)
def test_who_starts_the_ranks(words: list[str], by_mpirun: bool, tmp_path: Path) -> None:
    file = tmp_path / "options"
    file.write_text("controller: mpi\n")
    words = [str(file) if word == "FILE" else word for word in words]
    given = make_parser().parse_args(["-np", "1", *words, "true"], namespace=Given())
    assert is_asked(given) == by_mpirun


def test_options_of_mpirun_without_it_are_named(caplog: pytest.LogCaptureFixture) -> None:
    assert run_commandline(["-np", "1", "--tcp", "--gloo", "--mpi-args=-x A", "true"]) == 0
    assert "--tcp has no effect without --mpi" in caplog.text
    assert "--mpi-args has no effect without --mpi" in caplog.text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--mpi", "--gloo", "-np", "2"], "not allowed with argument --mpi"),
        (["--mpi"], "the number of ranks is missing"),
        (["-np", "2", "--mpi-args", "'x"], "argument --mpi-args: cannot be split into words (No closing quotation)"),
        (["-np", "2", "--binding-args", "'x"], "argument --binding-args: cannot be split into words"),
        (["-np", "2", "--ssh-command", "ssh 'x"], "argument --ssh-command: cannot be split into words"),
        (["-np", "2", "--ssh-command", ""], "argument --ssh-command: is empty; name a program"),
    ],
)
def test_wrong_use(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_commandline([*words, *PROGRAM])
    assert sentence in capsys.readouterr().err


def test_a_folder_for_output_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = tmp_path / "mpirun" / "logs"
    assert run_commandline(["--mpi", "-np", "2", "--output-filename", str(folder), *PROGRAM]) == 2
    assert f"output_filename: cannot write {folder}: Not a directory" in caplog.text


def test_mpirun_gets_the_signals_that_python_ignores(tmp_path: Path) -> None:
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'; grep SigIgn /proc/self/status\n")
    (tmp_path / "mpirun").chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "farandole.compat.horovodrun", "--mpi", "-np", "2", *PROGRAM],
        env={"PATH": f"{tmp_path}:/bin:/usr/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    ignored = int(done.stdout.splitlines()[-1].split()[1], 16)
    assert [name for name in (signal.SIGPIPE, signal.SIGXFSZ) if ignored >> name - 1 & 1] == []
