"""Launcher pods of MPI operators: the files that a kubelet replaces, and the environment variables."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

LAUNCHER = "job-launcher"

# Variables that the controller sets for the launcher. FILE stands for the host file, N for the slots per worker.
VARIABLES = {
    "OpenMPI": {
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": "FILE",
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        "OMPI_MCA_orte_set_default_slots": "N",
    },
    "Intel": {
        "I_MPI_HYDRA_HOST_FILE": "FILE",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": "-o ConnectionAttempts=10",
        "I_MPI_PERHOST": "N",
    },
    "MPICH": {"HYDRA_HOST_FILE": "FILE", "HYDRA_LAUNCH_EXTRA_ARGS": "-o ConnectionAttempts=10"},
}


class Controller:
    """Controller and kubelet of one job: `write` replaces the files as a kubelet replaces those of a ConfigMap."""

    def __init__(self, folder: Path, kind: str = "OpenMPI", *, as_worker: bool = False, domain: str = "") -> None:
        self.folder, self.kind, self.as_worker, self.domain = folder, kind, as_worker, domain
        self.slots, self._version = 2, 0
        (folder / "..0").mkdir(parents=True)
        (folder / "..data").symlink_to("..0")
        for name in ("hostfile", "discover_hosts.sh"):
            (folder / name).symlink_to(f"..data/{name}")

    def name(self, worker: int | None) -> str:
        pod = LAUNCHER if worker is None else f"job-worker-{worker}"
        return f"{pod}.job.team.svc{self.domain}"

    def write(self, workers: int, running: Callable[[int], bool] = lambda worker: True) -> None:
        """Replace both files atomically, for `workers` pods of which those with `running(worker)` run."""
        all_workers: list[int | None] = [*([None] if self.as_worker else []), *range(workers)]
        line = "{} slots={}\n" if self.kind == "OpenMPI" else "{}:{}\n"
        pods = [self.name(each) for each in all_workers if each is None or running(each)]
        # The controller sorts the names of the workers.
        pods = [*pods[: self.as_worker], *sorted(pods[self.as_worker :])]
        self._version += 1
        new = self.folder / f"..{self._version}"
        new.mkdir()
        (new / "hostfile").write_text("".join(line.format(self.name(each), self.slots) for each in all_workers))
        (new / "discover_hosts.sh").write_text("#!/bin/sh\n" + "".join(f"echo {pod}\n" for pod in pods))
        (self.folder / "..data_tmp").symlink_to(new.name)
        (self.folder / "..data_tmp").rename(self.folder / "..data")

    def variables(self) -> dict[str, str]:
        env = {"K_MPI_JOB_ROLE": "launcher"}
        if not self.as_worker:
            env |= {"NVIDIA_VISIBLE_DEVICES": "", "NVIDIA_DRIVER_CAPABILITIES": ""}
        for name, value in VARIABLES[self.kind].items():
            env[name] = value.replace("FILE", str(self.folder / "hostfile")).replace("N", str(self.slots))
        return env


# A script like the training operator's. Without -i, kubectl gives the program no standard input.
KUBEXEC = """#!/bin/sh
set -x
POD_NAME=$1
shift
{kubectl} exec ${{POD_NAME}} --container mpi -- /bin/sh -c "$*"
"""
# A kubectl that runs the pod's program on this machine, and writes its process id to a file.
KUBECTL = """#!/bin/sh
test "$1 $2 $4 $5 $6 $7 $8" = "exec -i --container mpi -- /bin/sh -c" || {{ echo "unexpected: $*" >&2; exit 1; }}
echo "$3" >>{log}
echo $$ >{folder}/$3.pid
shift 8
exec sh -c "$1"
"""


class TrainingOperator:
    """Launcher pod of an MPIJob (kubeflow.org/v1) of Kubeflow's training operator, as Flyte creates it.

    The workers run no ssh server, and their names have no addresses."""

    def __init__(self, folder: Path, *, slots: int = 1) -> None:
        self.folder, self.slots, self.log = folder, slots, folder / "log"
        folder.mkdir()
        kubectl = folder / "kubectl"
        kubectl.write_text(KUBECTL.format(log=self.log, folder=folder))
        (folder / "kubexec.sh").write_text(KUBEXEC.format(kubectl=kubectl))
        for script in (kubectl, folder / "kubexec.sh"):
            script.chmod(0o755)

    def write(self, workers: int, running: int | None = None) -> None:
        """Write both files for `workers` pods, of which the first `running` run (None: all)."""
        names = [f"job-worker-{worker}" for worker in range(workers)]
        (self.folder / "hostfile").write_text("".join(f"{name} slots={self.slots}\n" for name in names))
        script = "".join(f"echo {name}:{self.slots}\n" for name in names[:running])
        (self.folder / "discover_hosts.sh").write_text(f"#!/bin/sh\n{script}")

    def kill(self, worker: int) -> None:
        """Kill the program in a worker's pod, as when its container is restarted."""
        os.kill(int((self.folder / f"job-worker-{worker}.pid").read_text()), signal.SIGKILL)

    def variables(self) -> dict[str, str]:
        """Return the variables that the controller sets for the launcher."""
        return {
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
            "OMPI_MCA_plm_rsh_agent": str(self.folder / "kubexec.sh"),
            "OMPI_MCA_orte_default_hostfile": str(self.folder / "hostfile"),
            "NVIDIA_VISIBLE_DEVICES": "",
            "NVIDIA_DRIVER_CAPABILITIES": "",
        }
