"""Jobs of the MPI operator: the controller's files and variables, and a kubelet that rewrites them meanwhile."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from farandole.errors import ConfigError, HostsError, SlotsError
from farandole.launch.backend import Host
from farandole.launch.backends import choose_backend, find_site, mpi_operator, variables_of_ranks
from farandole.launch.backends.local import LocalBackend
from farandole.launch.backends.mpi_operator import OperatorJob, key_of_job, prte_variables
from farandole.launch.backends.ssh import Ssh, SshBackend
from farandole.launch.hosts import fill_slots
from helpers.mpi_operator import LAUNCHER, VARIABLES, Controller

SHORT = timedelta(seconds=0.5)
LONG = timedelta(seconds=60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "etc-mpi"


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The host names that have an address; the pod's own is that of the launcher."""
    names: set[str] = set()
    real = socket.getaddrinfo

    def lookup(name: str, *rest: object, **more: object) -> object:
        if not name.startswith("job-"):
            return real(name, *rest, **more)  # type: ignore[arg-type]
        if name not in names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))]  # nobody's (RFC 5737)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(socket, "gethostname", lambda: LAUNCHER)
    yield names


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Callable[[Controller], None]:
    """Make this process the launcher of a controller's job."""

    def enter(controller: Controller) -> None:
        for name, value in controller.variables().items():
            monkeypatch.setenv(name, value)

    return enter


@pytest.mark.parametrize("kind", VARIABLES)
@pytest.mark.parametrize("as_worker", [False, True])
@pytest.mark.parametrize("domain", ["", ".cluster.local"])
def test_hosts_and_slots(folder: Path, known: set[str], kind: str, as_worker: bool, domain: str) -> None:
    controller = Controller(folder, kind, as_worker=as_worker, domain=domain)
    controller.write(12)
    hosts = job_of(controller).read_hosts()
    workers = [Host(f"job-worker-{worker}.job.team.svc{domain}", 2) for worker in range(12)]
    assert hosts == (*([Host("localhost", 2)] if as_worker else []), *workers)
    filled = fill_slots(hosts, 4)
    assert filled == [hosts[0], hosts[0], hosts[1], hosts[1]]


@pytest.mark.parametrize("kind", VARIABLES)
def test_a_rank_in_each_slot(folder: Path, known: set[str], launcher: Callable[[Controller], None], kind: str) -> None:
    controller = Controller(folder, kind)
    controller.write(3)
    known |= {controller.name(worker) for worker in range(3)}
    launcher(controller)
    backend = choose_backend(None, None, None, Ssh(), None, SHORT)
    assert isinstance(backend, SshBackend)
    assert sum(host.slots for host in backend.hosts) == 6
    assert choose_backend(None, folder / "hostfile", None, Ssh(), None, SHORT).hosts == backend.hosts
    with pytest.raises(SlotsError, match=r"7 ranks need 7 slots, but .*job-worker-2\.job\.team\.svc:2 has 6"):
        choose_backend(None, None, 7, Ssh(), None, SHORT)
    assert isinstance(choose_backend("localhost:2", None, 2, Ssh()), LocalBackend)


def test_a_launcher_that_is_the_only_worker(
    folder: Path, known: set[str], launcher: Callable[[Controller], None]
) -> None:
    """Its own name has no address, and it needs no ssh to itself."""
    controller = Controller(folder, as_worker=True)
    controller.write(1)
    launcher(controller)
    assert isinstance(choose_backend(None, None, 2, Ssh(), None, SHORT), LocalBackend)
    with pytest.raises(HostsError, match=r"job-worker-0\.job\.team\.svc"):
        choose_backend(None, None, 4, Ssh(), None, SHORT)


def test_slots_of_the_environment(folder: Path, known: set[str]) -> None:
    controller = Controller(folder, "Intel")
    controller.write(1)
    (folder / "..1" / "hostfile").write_text("job-worker-0.job.team.svc\njob-worker-1.job.team.svc:3\n")
    env = controller.variables() | {"I_MPI_PERHOST": "4"}
    job = OperatorJob.find(env)
    assert job is not None and [host.slots for host in job.read_hosts()] == [4, 3]
    with pytest.raises(ConfigError, match="I_MPI_PERHOST: must be a number of slots >= 1, got 'all'"):
        OperatorJob.find(env | {"I_MPI_PERHOST": "all"})


def job_of(controller: Controller) -> OperatorJob:
    job = OperatorJob.find(controller.variables())
    assert job is not None
    return job


def test_names_that_come_late(folder: Path, known: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller makes one worker more meanwhile."""
    controller = Controller(folder)
    controller.write(2)
    known.add(controller.name(0))
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            controller.write(3)
        elif len(pauses) == 7:
            known.update(controller.name(worker) for worker in range(3))

    monkeypatch.setattr(mpi_operator.time, "sleep", sleep)
    hosts = job_of(controller).wait_for_hosts(None, LONG)
    assert [host.name for host in hosts] == [controller.name(worker) for worker in range(3)]
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_only_hosts_that_get_ranks_are_waited_for(folder: Path, known: set[str]) -> None:
    controller = Controller(folder)
    controller.write(4)
    known |= {controller.name(0), controller.name(1)}
    assert len(job_of(controller).wait_for_hosts(4, SHORT)) == 4


def test_names_that_never_come(folder: Path, known: set[str], caplog: pytest.LogCaptureFixture) -> None:
    controller = Controller(folder)
    controller.write(3, running=lambda worker: worker != 2)
    known.add(controller.name(0))
    before = time.monotonic()
    with pytest.raises(HostsError) as refused:
        job_of(controller).wait_for_hosts(None, timedelta(seconds=1))
    assert 1.0 <= time.monotonic() - before < 20.0
    text = "its name has no address after 1 s (Name or service not known)"
    rest = "; raise start_timeout (FARANDOLE_START_TIMEOUT) if it needs more time"
    pod = "; the operator does not list its pod as running: kubectl describe pod job-worker-2"
    assert refused.value.reasons == {
        controller.name(1): f"{text}{rest}",
        controller.name(2): f"{text}{pod}{rest}",
    }
    assert [record.getMessage() for record in caplog.records] == [
        f"waiting up to 1 s for the addresses of {controller.name(1)}, {controller.name(2)}"
    ]


@pytest.mark.parametrize("as_worker", [False, True])
def test_discovery(folder: Path, known: set[str], as_worker: bool) -> None:
    """The script sorts by name, and names no slots."""
    controller = Controller(folder, as_worker=as_worker)
    controller.write(12, running=lambda worker: worker in (2, 10, 11))
    names = [*([controller.name(None)] if as_worker else []), *(controller.name(worker) for worker in (2, 10, 11))]
    assert job_of(controller).discover() == tuple(Host(name, 2) for name in names)
    controller.write(12, running=lambda worker: False)
    assert job_of(controller).discover() == tuple(Host(name, 2) for name in names[:as_worker])


def test_a_discovery_that_fails(folder: Path) -> None:
    controller = Controller(folder)
    controller.write(1)
    (folder / "..1" / "discover_hosts.sh").write_text("echo no >&2; exit 3\n")
    with pytest.raises(ConfigError, match=r"discover_hosts.sh failed with code 3: no"):
        job_of(controller).discover()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("job-worker-0:3", Host("job-worker-0", 3)),
        ("[fd00::1]:3", Host("fd00::1", 3)),
        ("[fd00::1]", Host("fd00::1", 2)),
        ("job-worker-0:0", "'job-worker-0:0' is no host"),
        ("job-worker-0:x", "'job-worker-0:x' is no host"),
        ("job-worker-0:²", "'job-worker-0:²' is no host"),
        ("job-worker-0:2:3", "'job-worker-0:2:3' is ambiguous"),
    ],
)
def test_slots_that_a_discovery_prints(folder: Path, line: str, found: Host | str) -> None:
    controller = Controller(folder)
    controller.write(1)
    (folder / "..1" / "discover_hosts.sh").write_text(f"echo '{line}'\n")
    if isinstance(found, Host):
        assert job_of(controller).discover() == (found,)
        return
    with pytest.raises(ConfigError, match=f"host_discovery_script: {found}"):
        job_of(controller).discover()


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"K_MPI_JOB_ROLE": "worker"},
        {"K_MPI_JOB_ROLE": "launcher", "FARANDOLE_RANK": "0"},
        {"K_MPI_JOB_ROLE": "launcher", "OMPI_COMM_WORLD_SIZE": "4"},
        {"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"},
    ],
)
def test_processes_that_are_no_launcher(env: dict[str, str]) -> None:
    assert find_site(env) is None
    assert variables_of_ranks(env) == env


def test_the_launcher_of_kubeflow_trainer_has_no_role(folder: Path, known: set[str]) -> None:
    controller = Controller(folder)
    env = controller.variables()
    del env["K_MPI_JOB_ROLE"]
    job = OperatorJob.find(env | {"KUBERNETES_SERVICE_HOST": "10.96.0.1"})
    assert job is not None and job.hostfile == folder / "hostfile"
    (folder / "..0" / "hostfile").write_text("job-node-0-0.job slots=2\njob-node-0-1.job slots=2\n")
    with pytest.raises(HostsError) as refused:
        job.wait_for_hosts(None, timedelta(0))
    assert "kubectl" not in str(refused.value)  # it has no discovery script


def test_a_launcher_without_its_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: set[str]
) -> None:
    monkeypatch.setattr(mpi_operator, "HOSTFILE", tmp_path / "hostfile")
    monkeypatch.setenv("K_MPI_JOB_ROLE", "launcher")
    with pytest.raises(ConfigError, match=r"launcher's pod of an MPI job, but .*/hostfile is missing; name hosts with"):
        choose_backend(None, None, 4, Ssh(), None, SHORT)


def test_ssh_of_a_job(tmp_path: Path, folder: Path) -> None:
    job = job_of(Controller(folder, "MPICH"))
    ssh = job.shell(Ssh(command="ssh -F mine", identity_file="key"), timedelta(seconds=45))
    assert isinstance(ssh, Ssh)
    words = ssh.words("job-worker-0", "true")
    assert words[:5] == ["ssh", "-F", "mine", "-o", "ConnectionAttempts=45"]
    assert ssh.identity_file == "key"
    assert "ConnectionAttempts=100" in job.shell(Ssh(), timedelta(hours=1)).words("job-worker-0", "true")
    assert "ConnectionAttempts=10" in job.shell(Ssh(), timedelta(seconds=1)).words("job-worker-0", "true")


def test_the_key_of_a_job(tmp_path: Path) -> None:
    mounts, secret, home = tmp_path / "mounts", tmp_path / "a secret", tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    secret.mkdir()
    mounts.write_text(f"proc /proc proc rw 0 0\ntmpfs {str(secret).replace(' ', chr(92) + '040')} tmpfs ro 0 0\n")
    assert key_of_job(mounts, home) is None
    for name in ("id_rsa", "id_rsa.pub", "authorized_keys"):
        (secret / name).touch()
    assert key_of_job(mounts, home) == str(secret / "id_rsa")
    (home / ".ssh" / "id_rsa").touch()
    assert key_of_job(mounts, home) is None  # ssh finds it


@pytest.mark.parametrize("as_worker", [False, True])
def test_variables_of_open_mpi_5(folder: Path, known: set[str], as_worker: bool) -> None:
    controller = Controller(folder, as_worker=as_worker)
    controller.write(2)
    env = controller.variables() | {"PRTE_MCA_prte_set_default_slots": "7"}
    assert prte_variables(env) == {
        "PRTE_MCA_prte_default_hostfile": str(folder / "hostfile"),
        "PRTE_MCA_prte_keep_fqdn_hostnames": "false" if as_worker else "true",
        "PRTE_MCA_plm_ssh_args": "-o ConnectionAttempts=10",
    }
    assert prte_variables(Controller(folder.with_name("other"), "Intel").variables()) == {}


def test_ranks_get_a_workers_variables(folder: Path) -> None:
    env = Controller(folder).variables() | {"HOSTNAME": LAUNCHER, "PATH": "/bin", "EMPTY": ""}
    kept = variables_of_ranks(env)
    assert kept["K_MPI_JOB_ROLE"] == "worker" and kept["PATH"] == "/bin" and kept["EMPTY"] == ""
    assert {"HOSTNAME", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"} & set(kept) == set()
    given = variables_of_ranks(env | {"NVIDIA_VISIBLE_DEVICES": "0,1"})
    assert given["NVIDIA_VISIBLE_DEVICES"] == "0,1"


def command(env: dict[str, str], *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "farandole.integrations.mpi_operator", *words],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_command_for_mpirun(folder: Path) -> None:
    controller = Controller(folder)
    controller.write(1)
    (folder / "..1" / "hostfile").write_text("localhost slots=2\n")
    env = controller.variables()
    done = command(env)
    assert done.returncode == 0, done.stderr
    assert f"export PRTE_MCA_prte_default_hostfile={folder}/hostfile\n" in done.stdout
    done = command(env, "sh", "-c", "echo $PRTE_MCA_plm_ssh_args; exit 5")
    assert (done.returncode, done.stdout) == (5, "-o ConnectionAttempts=10\n")
    done = command(env, "no-such-mpirun")
    assert done.returncode == 127 and "cannot run 'no-such-mpirun'" in done.stderr
    done = command({}, "true")
    assert done.returncode == 2 and "this is no launcher's pod" in done.stderr
    (folder / "..1" / "hostfile").write_text("there.invalid slots=2\n")
    done = command(env | {"FARANDOLE_START_TIMEOUT": "1"}, "true")
    assert done.returncode == 2 and "there.invalid: its name has no address after" in done.stderr


# The launcher's command with a resolver that looks names up in a file, as the cluster's DNS learns them.
RUN = """
import socket, sys
real = socket.getaddrinfo
def lookup(name, *rest, **more):
    if not str(name).startswith("job-"):
        return real(name, *rest, **more)
    if name not in open({names!r}).read().split():
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))]
socket.getaddrinfo, socket.gethostname = lookup, lambda: "job-launcher"
from farandole.launch.cli import main
sys.exit(main())
"""
# Stands for ssh: its last argument is the remote command, the one before it the host.
SSH = """#!/bin/sh
for last; do host="$word"; word="$last"; done
echo "$host" >> {log}
SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22" exec sh -c "$last"
"""
RANK = (
    "import os; print(os.environ['FARANDOLE_RANK'], os.environ['FARANDOLE_SIZE'], os.environ['K_MPI_JOB_ROLE'], "
    "os.environ.get('NVIDIA_VISIBLE_DEVICES'), flush=True)"
)


@pytest.mark.native
@pytest.mark.parametrize("as_worker", [False, True])
def test_a_plain_run_finds_its_ranks(folder: Path, tmp_path: Path, as_worker: bool) -> None:
    """The second worker's name comes late; ssh is a stand-in that starts the agents on this machine."""
    names, log = tmp_path / "names", tmp_path / "log"
    controller = Controller(folder, as_worker=as_worker)
    controller.write(2, running=lambda worker: worker == 0)
    names.write_text(controller.name(0))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH.format(log=log))
    (tmp_path / "bin" / "ssh").chmod(0o755)
    env = {**os.environ, **controller.variables(), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    words = [sys.executable, "-c", RUN.format(names=str(names)), "run", sys.executable, "-c", RANK]
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stderr is not None
            said = process.stderr.readline()
            assert "waiting up to 120 s for the addresses of job-worker-1.job.team.svc" in said
            assert not log.exists()  # nothing starts before all can
            names.write_text(f"{controller.name(0)} {controller.name(1)}")
            controller.write(2)
            output, errors = process.communicate(timeout=100)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    size = 6 if as_worker else 4
    assert sorted(output.splitlines()) == [f"[{rank}] {rank} {size} worker None" for rank in range(size)]
    assert sorted(log.read_text().split()) == [controller.name(0), controller.name(1)]


def test_the_wait_for_names_ends_at_once_on_ctrl_c(folder: Path, known: set[str]) -> None:
    import signal

    controller = Controller(folder)
    controller.write(1)
    timer = threading.Timer(0.5, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        job_of(controller).wait_for_hosts(None, LONG)
    assert time.monotonic() - before < 20.0
    timer.join()
