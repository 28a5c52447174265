"""A job of the MPI operator with the image's ssh server and configuration: pods that are network namespaces."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from namespaces import bridge, inside, namespaces

from helpers.marked import running, wait_for_ranks
from helpers.mpi_operator import LAUNCHER, Controller
from helpers.mpi_sites import SURROUNDINGS
from helpers.ssh_hosts import SSHD, command_lines, key, net_of, problem

pytestmark = [
    pytest.mark.native,
    pytest.mark.slow,
    pytest.mark.skipif(bool(problem()), reason=problem() or "hosts"),
]

IMAGE = Path(__file__).parents[2] / "deploy" / "image"
PROGRAM = """
import os, socket, sys
import numpy, farandole.numpy as hvd
hvd.init()
total = hvd.allreduce(numpy.arange(2.0) + hvd.rank(), op=hvd.Sum).tolist()
pod, role = socket.gethostname(), os.environ.get("K_MPI_JOB_ROLE")
sys.stdout.write(f"rank {hvd.rank()} of {hvd.size()} in {pod} as {role}: {hvd.local_rank()}, {total}\\n")
hvd.shutdown()
"""
# Goes on from its checkpoint; hangs after the first epoch that it makes, in the first two runs.
RESUMING = """
import json, pathlib, sys, threading
import numpy, farandole.numpy as hvd
hvd.init()
folder = pathlib.Path(sys.argv[1])
checkpoint = folder / "checkpoint"
done = json.loads(checkpoint.read_text()) if checkpoint.exists() else []
hvd.barrier()  # all have read it
first = len(done)
for epoch in range(first, 4):
    total = hvd.allreduce(numpy.array([epoch + hvd.rank()]), op=hvd.Sum)[0]
    done.append([epoch, first, int(total)])
    if hvd.rank() == 0:
        (folder / "new").write_text(json.dumps(done))
        (folder / "new").rename(checkpoint)
    hvd.barrier()
    if epoch < 2:
        (folder / f"rank{hvd.rank()}").touch()
        threading.Event().wait(100)
if hvd.rank() == 0:
    print(json.dumps(done))
hvd.shutdown()
"""
# Makes the pod: its name, its /etc/hosts, its ssh configuration, and the job's keys as a mount. Runs the rest there.
POD = """
hostname {name}
mount --make-rprivate /
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/ssh_config /etc/ssh/ssh_config
mount --bind {folder}/keys {folder}/keys
exec "$@"
"""


@dataclass
class Pods:
    """A launcher and two workers, none of which runs yet or has a name."""

    folder: Path
    spaces: Sequence[str]
    addresses: Sequence[str]
    servers: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def inside(self, place: int, name: str, *words: str) -> list[str]:
        pod = POD.format(name=name, folder=self.folder)
        return [*inside(self.spaces[place]), "unshare", "--mount", "--uts", "sh", "-ec", pod, "sh", *words]

    def serve(self, worker: int, config: str = "sshd_config") -> None:
        """Start the worker's ssh server."""
        words = self.inside(worker + 1, f"job-worker-{worker}", str(SSHD), "-D", "-e", "-f", str(self.folder / config))
        self.servers.append(subprocess.Popen(words, stderr=subprocess.DEVNULL))

    def restart(self, worker: int) -> None:
        """Kill all that runs in a worker's pod, and start its server again, as the kubelet does with a container."""
        server = self.servers[worker]
        for each in [server.pid, *below(server.pid)]:
            with suppress(ProcessLookupError):  # its own guard was faster
                os.kill(each, signal.SIGKILL)
        server.wait()
        self.serve(worker)
        self.servers[worker] = self.servers.pop()

    def publish(self, controller: Controller, worker: int) -> None:
        """Give the worker's name its address, as the cluster's DNS does."""
        with (self.folder / "hosts").open("a") as hosts:  # its content changes, the file that is mounted stays
            hosts.write(f"{self.addresses[worker + 1]} {controller.name(worker)}\n")


def below(process: int) -> list[int]:
    """Return the processes that a process and its children have started."""
    children: list[str] = []
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [each for child in map(int, children) for each in (child, *below(child))]


@contextmanager
def made_pods(folder: Path) -> Iterator[Pods]:
    """Make the pods' network and the job's Secret; servers that were started end with the block."""
    Path("/run/sshd").mkdir(exist_ok=True)
    keys = folder / "keys"
    keys.mkdir()
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-N", "", "-f", keys / "id_rsa"], check=True, timeout=30
    )
    shutil.copy(keys / "id_rsa.pub", keys / "authorized_keys")
    key(folder / "stranger")
    (folder / "hosts").write_text("127.0.0.1 localhost\n")
    client, server = ((IMAGE / name).read_text() for name in ("ssh_config", "sshd_config"))
    (folder / "ssh_config").write_text(client.replace("%d/.ssh/", f"{keys}/"))
    server = server.replace("/home/mpiuser/.ssh/", f"{keys}/")
    (folder / "sshd_config").write_text(server)
    (folder / "stranger_config").write_text(server.replace(f"HostKey {keys}/id_rsa", f"HostKey {folder}/stranger"))
    with namespaces(3) as spaces, bridge(spaces) as address:
        pods = Pods(folder, spaces, [f"{net_of(address)}{place + 1}" for place in range(3)])
        try:
            yield pods
        finally:
            for each in pods.servers:
                each.kill()
                each.wait()
    assert [line for line in command_lines() if str(folder).encode() in line] == []


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    with made_pods(tmp_path) as pods:
        yield pods


def lines_of(ranks: Sequence[str], total: float) -> list[str]:
    """Return the output of ranks in these pods, two in each."""
    size = 2 * len(ranks)
    return [
        f"rank {2 * place + local} of {size} in {pod} as worker: {local}, [{total}, {total + size}]"
        for place, pod in enumerate(ranks)
        for local in range(2)
    ]


def farandole_run(
    pods: Pods, controller: Controller, mark: str, *words: str
) -> AbstractContextManager["subprocess.Popen[str]"]:
    """Run the launcher's container with `farandole run` of a Python program."""
    command = ["-m", "farandole.launch.cli", "run", sys.executable, *words]
    words_in_pod = pods.inside(0, LAUNCHER, sys.executable, *command)
    return running(words_in_pod, controller.variables(), mark, cwd=pods.folder)


@pytest.mark.parametrize("as_worker", [False, True])
def test_a_plain_run_trains_in_all_pods(pods: Pods, tmp_path: Path, mark: str, as_worker: bool) -> None:
    """One worker gets its name late, and its server starts only then."""
    controller = Controller(tmp_path / "etc-mpi", as_worker=as_worker)
    controller.write(2, running=lambda worker: worker == 0)
    pods.serve(0)
    pods.publish(controller, 0)
    with farandole_run(pods, controller, mark, "-c", PROGRAM) as process:
        assert process.stderr is not None
        assert "for the addresses of job-worker-1.job.team.svc" in process.stderr.readline()
        pods.publish(controller, 1)
        controller.write(2)
        time.sleep(2.0)  # the name is there, and connections are refused
        pods.serve(1)
        output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    workers = ["job-worker-0", "job-worker-1"]
    expected = lines_of([LAUNCHER, *workers], 15.0) if as_worker else lines_of(workers, 6.0)
    assert sorted(line.partition("] ")[2] for line in output.splitlines()) == expected


def test_a_worker_with_another_key_is_refused(pods: Pods, tmp_path: Path) -> None:
    controller = Controller(tmp_path / "etc-mpi")
    controller.write(2)
    pods.serve(0)
    pods.serve(1, "stranger_config")
    for worker in range(2):
        pods.publish(controller, worker)
    words = pods.inside(0, LAUNCHER, sys.executable, "-m", "farandole.launch.cli", "run", "true")
    env = {**os.environ, **controller.variables()}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2, done.stdout
    refused = [line for line in done.stderr.splitlines() if line.startswith("  job-worker-")]
    assert len(refused) == 1 and refused[0].startswith("  job-worker-1.job.team.svc: "), done.stderr
    assert "Host key verification failed" in refused[0]


@pytest.mark.timeout(400)
def test_pods_that_are_restarted_go_on_from_the_programs_checkpoint(pods: Pods, tmp_path: Path, mark: str) -> None:
    """A launcher's pod that is lost takes all ranks with it; so does a worker's, and the launcher says which it was."""
    controller = Controller(tmp_path / "etc-mpi")
    controller.write(2)
    for worker in range(2):
        pods.serve(worker)
        pods.publish(controller, worker)
    with farandole_run(pods, controller, mark, "-c", RESUMING, str(tmp_path)) as process:
        wait_for_ranks(process, tmp_path, 4)
        process.kill()
    with farandole_run(pods, controller, mark, "-c", RESUMING, str(tmp_path)) as process:
        wait_for_ranks(process, tmp_path, 4)
        pods.restart(1)
        _, said = process.communicate(timeout=100)
    assert process.returncode not in (0, None)  # so that the Job of the launcher starts a pod again
    assert "job-worker-1.job.team.svc" in said
    with farandole_run(pods, controller, mark, "-c", RESUMING, str(tmp_path)) as process:
        output, said = process.communicate(timeout=100)
    assert process.returncode == 0, said
    assert "[0] [[0, 0, 6], [1, 1, 10], [2, 2, 14], [3, 2, 18]]" in output.splitlines()


@pytest.mark.skipif(shutil.which("mpirun.openmpi") is None, reason="Open MPI is not installed (openmpi-bin)")
@pytest.mark.parametrize("how", ["mpirun", "farandole run --mpi", "mpirun without the host file"])
def test_mpirun_of_a_job(pods: Pods, tmp_path: Path, how: str) -> None:
    """Without the host file, as Open MPI 5 behaves, all ranks run in the launcher, and are refused."""
    controller = Controller(tmp_path / "etc-mpi")
    controller.write(2)
    for worker in range(2):
        pods.serve(worker)
        pods.publish(controller, worker)
    env = {**os.environ, **SURROUNDINGS, **controller.variables(), "OMPI_MCA_orte_base_help_aggregate": "0"}
    env["OMPI_MCA_plm_rsh_agent"] = f"ssh -i {pods.folder / 'keys' / 'id_rsa'}"
    words = [sys.executable, "-m"]
    if how == "farandole run --mpi":
        (tmp_path / "mpirun").symlink_to(str(shutil.which("mpirun.openmpi")))
        env["PATH"] = f"{tmp_path}:{env['PATH']}"
        words += ["farandole.launch.cli", "run", "--mpi", "-np", "4", "--mpi-args=--mca btl self,tcp"]
    else:
        options = ["-host", f"{LAUNCHER}:4"] if how == "mpirun without the host file" else []
        words += ["farandole.integrations.mpi_operator", "mpirun.openmpi", *options, "-np", "4"]
        words += ["--mca", "btl", "self,tcp"]
    words += [sys.executable, "-c", PROGRAM.replace(" as {role}", " as worker")]
    done = subprocess.run(
        pods.inside(0, LAUNCHER, *words),
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if how != "mpirun without the host file":
        assert done.returncode == 0, done.stderr
        assert sorted(line.rpartition("stdout>:")[2] for line in done.stdout.splitlines()) == lines_of(
            ["job-worker-0", "job-worker-1"], 6.0
        )
    else:
        assert done.returncode != 0
        assert f"mpirun has started ranks on {LAUNCHER}, which is none of them" in done.stderr
