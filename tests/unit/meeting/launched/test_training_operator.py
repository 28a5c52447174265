"""Jobs of Kubeflow's training operator, in which `kubectl exec` takes the place of ssh."""

import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from farandole.errors import ConfigError, HostsError
from farandole.launch import agent
from farandole.launch.backends.kubexec import Kubexec
from farandole.launch.backends.mpi_operator import OperatorJob
from farandole.launch.backends.ssh import Ssh
from helpers.mpi_operator import TrainingOperator

SHORT = timedelta(seconds=0.3)
RANK = "import os; e = os.environ; print(e['FARANDOLE_RANK'], e['FARANDOLE_SIZE'], 'NVIDIA_VISIBLE_DEVICES' in e)"


def job_of(operator: TrainingOperator) -> OperatorJob:
    job = OperatorJob.find(operator.variables())
    assert job is not None
    return job


def test_kubectl_gets_the_scripts_options_and_standard_input(tmp_path: Path) -> None:
    operator = TrainingOperator(tmp_path / "etc-mpi")
    shell = job_of(operator).shell(Ssh(), SHORT)
    assert shell == Kubexec(str(tmp_path / "etc-mpi" / "kubectl"), ("--container", "mpi"))
    words = shell.words("job-worker-0", "cd / && exec env python")
    assert words[1:] == [
        "exec",
        "-i",
        "job-worker-0",
        "--container",
        "mpi",
        "--",
        "/bin/sh",
        "-c",
        "cd / && exec env python",
    ]
    script = tmp_path / "kubexec.sh"
    script.write_text('#!/bin/sh\n/opt/kube/kubectl exec ${POD_NAME} -- /bin/sh -c "$*"')
    assert Kubexec.read(script) == Kubexec("/opt/kube/kubectl")
    script.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(ConfigError, match="has no line with 'kubectl exec POD -- COMMAND'"):
        Kubexec.read(script)


def test_pods_are_waited_for_by_the_discovery_script(tmp_path: Path) -> None:
    operator = TrainingOperator(tmp_path / "etc-mpi", slots=2)
    operator.write(3, running=2)
    with pytest.raises(HostsError, match=r"job-worker-2: its pod does not run after .* s; raise start_timeout"):
        job_of(operator).wait_for_hosts(None, SHORT)
    operator.write(3)
    assert [(host.name, host.slots) for host in job_of(operator).wait_for_hosts(None, SHORT)] == [
        ("job-worker-0", 2), ("job-worker-1", 2), ("job-worker-2", 2),
    ]  # fmt: skip


def test_fewer_workers_than_wanted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    operator = TrainingOperator(tmp_path / "etc-mpi")
    operator.write(4, running=2)
    job = job_of(operator)
    assert [host.name for host in job.wait_for_workers(2, 4, SHORT)] == ["job-worker-0", "job-worker-1"]
    assert "starting with 2 of 4 workers" in caplog.text and "job-worker-3" in caplog.text
    with pytest.raises(HostsError, match="job-worker-2"):
        job.wait_for_workers(3, 4, SHORT)


def test_a_pod_without_a_service_tells_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "job-worker-0")
    assert agent._own_name() == "job-worker-0"
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(agent, "own_addresses", lambda: ["127.0.0.1", "10.0.1.7", "fd00::7"])
    assert agent._own_name() == "10.0.1.7"


@pytest.mark.native
def test_a_plain_run_in_the_launchers_pod(tmp_path: Path) -> None:
    operator = TrainingOperator(tmp_path / "etc-mpi", slots=2)
    operator.write(2)
    env = {**os.environ, **operator.variables()}
    words = [sys.executable, "-m", "farandole.launch.cli", "run", sys.executable, "-c", RANK]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {rank} 4 False" for rank in range(4)]
    assert sorted(operator.log.read_text().split()) == ["job-worker-0", "job-worker-1"]
