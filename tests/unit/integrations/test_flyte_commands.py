"""Command lines of Flyte's MPI plug-in, `mpirun …` and `horovodrun …`, as farandole runs them in a launcher's pod."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from farandole.compat.horovodrun import make_parser
from farandole.compat.mpirun import read_options
from farandole.errors import ConfigError
from farandole.launch.elastic.hosts import HostScript
from farandole.launch.elastic.options import Elastic
from farandole.launch.options import Given
from farandole.launch.scripts import run_script
from helpers.flyte import loop, settings
from helpers.installed import require
from helpers.mpi_operator import TrainingOperator

require("flytekitplugins")

RANK = """
import os
env = os.environ
print(env["HOROVOD_RANK"], env["HOROVOD_SIZE"], env.get("NCCL_DEBUG"), "compat/importable" in env["PYTHONPATH"])
"""
TRAINED = "import farandole.numpy as hvd; hvd.init(); print(hvd.rank(), hvd.size())"
event_loop = pytest.fixture(scope="module", autouse=True)(loop)


def command_of(config: object) -> list[str]:
    """Return the plug-in's command line up to Flyte's own part."""
    from flytekit import task

    @task(task_config=config)
    def train(x: int) -> int:
        return x

    words: list[str] = train.get_command(settings())
    assert words[words.index("pyflyte-execute") + 1] == "--inputs"
    return words[: words.index("pyflyte-execute")]


def horovod_job(script: str = "/etc/mpi/discover_hosts.sh") -> object:
    from flytekitplugins.kfmpi import HorovodJob, Launcher, Worker

    return HorovodJob(
        launcher=Launcher(replicas=1), worker=Worker(replicas=2), slots=2, discovery_script_path=script, verbose=True
    )


def mpi_job() -> object:
    from flytekitplugins.kfmpi import Launcher, MPIJob, Worker

    return MPIJob(launcher=Launcher(replicas=1), worker=Worker(replicas=2), slots=2)


def in_pod(operator: TrainingOperator, module: str, words: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", module, *words, sys.executable, "-c", RANK],
        env={**os.environ, **operator.variables()},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_line_of_horovod_job_is_read_as_it_is() -> None:
    words = command_of(horovod_job())
    assert words == [
        *("horovodrun", "-np", "4", "--log-level", "INFO", "--network-interface", "eth0", "--min-np", "4"),
        *("--max-np", "4", "--slots-per-host", "2", "--host-discovery-script", "/etc/mpi/discover_hosts.sh"),
        *("--elastic-timeout", "1200", "--verbose"),
    ]
    given = make_parser().parse_args([*words[1:], "pyflyte-execute", "--inputs", "s3://i"], namespace=Given())
    assert (given.num_proc, given.verbose, given.command) == (4, True, ["pyflyte-execute", "--inputs", "s3://i"])
    assert given.settings == {"interface": "eth0", "log_level": "info", "elastic_timeout": "1200000000us"}
    script = "/etc/mpi/discover_hosts.sh"
    assert Elastic.of(given) == Elastic(min_num_proc=4, max_num_proc=4, slots=2, host_discovery_script=script)


@pytest.mark.native
def test_horovod_job_runs_in_the_workers_pods(tmp_path: Path) -> None:
    operator = TrainingOperator(tmp_path / "etc-mpi", slots=2)
    operator.write(2)
    words = command_of(horovod_job(str(operator.folder / "discover_hosts.sh")))
    words[words.index("eth0")] = "lo"  # this machine need not have it
    done = in_pod(operator, "farandole.compat.horovodrun", words[1:])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}]<stdout>:{rank} 4 None True" for rank in range(4)]
    assert sorted(operator.log.read_text().split()) == ["job-worker-0", "job-worker-1"]


def elastic_job(**fields: Any) -> object:
    from flytekitplugins.kfmpi import Launcher, Worker

    from farandole.integrations.flyte import ElasticHorovodJob

    return ElasticHorovodJob(launcher=Launcher(replicas=1), worker=Worker(replicas=2), slots=2, **fields)


def test_an_elastic_horovod_job_has_limits_of_its_own() -> None:
    given = make_parser().parse_args([*command_of(elastic_job())[1:], "pyflyte-execute"], namespace=Given())
    assert (given.num_proc, given.min_num_proc, given.max_num_proc) == (4, 2, 4)
    assert "interface" not in given.settings
    words = command_of(elastic_job(min_workers=2, max_workers=3, network_interface="net1"))
    given = make_parser().parse_args([*words[1:], "pyflyte-execute"], namespace=Given())
    assert (given.num_proc, given.min_num_proc, given.max_num_proc) == (4, 4, 6)
    assert given.settings["interface"] == "net1"
    for wrong in ({"min_workers": 3}, {"min_workers": 0}, {"max_workers": 1}):
        with pytest.raises(ConfigError, match="is 2, and must lie between"):
            elastic_job(**wrong)
    for broken in ({"min_workers": "1"}, {"min_workers": 1.5}, {"min_workers": None}, {"max_workers": 2.5}):
        with pytest.raises(ConfigError, match="_workers: must be a whole number, got"):
            elastic_job(**broken)


def test_an_elastic_horovod_job_has_one_launcher() -> None:
    from flytekitplugins.kfmpi import Launcher, Worker

    from farandole.integrations.flyte import ElasticHorovodJob

    launcher = Launcher(image="registry/launcher:1")
    made = ElasticHorovodJob(launcher=launcher, worker=Worker(replicas=2))
    assert (made.launcher.replicas, made.launcher.image, launcher.replicas) == (1, "registry/launcher:1", None)
    assert "--max-np" in command_of(ElasticHorovodJob(worker=Worker(replicas=4), min_workers=2))


@pytest.mark.native
def test_an_elastic_horovod_job_begins_without_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = TrainingOperator(tmp_path / "etc-mpi", slots=2)
    operator.write(1)
    monkeypatch.setenv("FARANDOLE_START_TIMEOUT", "2")
    monkeypatch.setattr(f"{__name__}.RANK", TRAINED)
    words = command_of(elastic_job(discovery_script_path=str(operator.folder / "discover_hosts.sh")))
    done = in_pod(operator, "farandole.compat.horovodrun", words[1:])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}]<stdout>:{rank} 2" for rank in range(2)]


def test_a_discovery_script_of_ones_own(tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("echo a\necho b:3\necho '[fd00::1]'\n")
    assert HostScript(script, 2).find_available_hosts_and_slots() == {"a": 2, "b": 3, "fd00::1": 2}


def test_a_discovery_script_that_prints_no_text(tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("printf '\\377:x'\n")
    with pytest.raises(ConfigError, match="xff:x' is no host"):
        HostScript(script, 2).find_available_hosts_and_slots()


@pytest.mark.parametrize("first", ["#!/usr/bin/env python3", "#!/bin/bash", None])
def test_a_discovery_script_in_any_language(tmp_path: Path, first: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "hosts"
    program = "print(*[f'h{number}:2' for number in range(3)])"
    if first != "#!/usr/bin/env python3":
        program = "hosts=(h0:2 h1:2 h2:2); echo ${hosts[*]}" if first else "echo h0:2 h1:2 h2:2"
    script.write_text(f"{first}\n{program}\n" if first else f"{program}\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert run_script(Path("hosts")) == ["h0:2", "h1:2", "h2:2"]


def test_the_line_of_mpi_job_is_read_as_it_is() -> None:
    words = command_of(mpi_job())
    assert words[:3] == ["mpirun", "--allow-run-as-root", "-bind-to"]
    options, variables, command = read_options([*words[1:], "pyflyte-execute", "--inputs", "s3://i"])
    assert options == ["--binding", "none", "-np", "4"]
    assert variables == {"NCCL_DEBUG": "INFO"}
    assert command[0] == "python" and command[2:] == ["pyflyte-execute", "--inputs", "s3://i"]


@pytest.mark.native
def test_mpi_job_runs_in_the_workers_pods(tmp_path: Path) -> None:
    operator = TrainingOperator(tmp_path / "etc-mpi", slots=2)
    operator.write(2)
    words = command_of(mpi_job())
    done = in_pod(operator, "farandole.compat.mpirun", words[1 : words.index("python")])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {rank} 4 INFO True" for rank in range(4)]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["-map-by", "node"], "-map-by node is not known here"),
        (["--rankfile", "file"], "--rankfile is not known here; farandole's mpirun fills slot after slot"),
        (["-mca", "pml"], "-mca needs 2 values"),
    ],
)
def test_an_mpirun_that_asks_for_something_else_is_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_options(words)


def test_hosts_of_an_mpirun() -> None:
    words = ["-n", "2", "--host", "a:1,b:1", "--bind-to", "core", "python", "-x"]
    assert read_options(words) == (["-np", "2", "-H", "a:1,b:1", "--binding", "cores"], {}, ["python", "-x"])


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (["-mca", "pml", "ob1", "-mca", "btl", "^openib"], []),
        (["-mca", "plm_rsh_args", "-p 12345"], ["--ssh-command", "ssh -p 12345"]),
        (["--mca", "plm_rsh_agent", "/usr/bin/ssh -q : rsh"], ["--ssh-command", "/usr/bin/ssh -q"]),
        (["--mca", "plm_rsh_agent", "/etc/mpi/kubexec.sh"], []),  # found by its variable
        (["-mca", "btl_tcp_if_include", "eth1"], ["--network-interface", "eth1"]),
        (["-mca", "btl_tcp_if_include", "eth1,ib0"], ["--network-interface", "eth1,ib0"]),
        (["-mca", "btl_tcp_if_include", "10.0.0.0/8"], []),
        (["-mca", "btl_tcp_if_exclude", "lo,docker0"], []),
    ],
)
def test_parameters_of_open_mpi_that_say_how_hosts_are_reached(given: list[str], options: list[str]) -> None:
    """As Horovod's page on containers has them: mpirun ... -mca plm_rsh_args "-p 12345"."""
    assert read_options([*given, "python"]) == (options, {}, ["python"])
