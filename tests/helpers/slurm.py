"""Slurm with two nodes on this machine, with daemons, keys and ports of its own."""

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

NODES = ("nodea", "nodeb")
SECONDS = 60.0  # until the nodes must be idle
_PATH = f"/usr/sbin:/sbin:{os.environ['PATH']}"
_CONFIG = """
ClusterName=farandole
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
CompleteWait=0
ReturnToService=2
MpiDefault=none
KillWait=2
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


def problem_of_slurm() -> str:
    """Return why this machine cannot run Slurm, or "" if it can."""
    missing = [each for each in ("munged", "slurmctld", "slurmd", "srun") if shutil.which(each, path=_PATH) is None]
    if missing or os.geteuid() != 0:
        return f"needs root and {', '.join(missing) or 'nothing else'} (packages slurm-wlm, munge)"
    return ""


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Mapping[str, str]]:
    """Start the daemons; yield the environment for Slurm's commands. The block's end stops the daemons."""
    with contextlib.ExitStack() as taken:
        sockets = [taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(1 + len(NODES))]
        ports = [each.getsockname()[1] for each in sockets]
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    names = socket.gethostname()
    lines = [
        f"NodeName={name} NodeHostname={names} NodeAddr=127.0.0.1 Port={port} CPUs=4 State=UNKNOWN"
        for name, port in zip(NODES, ports[1:], strict=True)
    ]
    config = folder / "slurm.conf"
    config.write_text(
        _CONFIG.format(
            host=names,
            user=getpass.getuser(),
            ports=ports,
            folder=folder,
            nodes="\n".join(lines),
            names=",".join(NODES),
        )
    )
    env = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(config)}
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge"]
    munged += [f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
    daemons = [munged, ["slurmctld", "-D", "-i"], *(["slurmd", "-D", "-N", name] for name in NODES)]
    with contextlib.ExitStack() as stack:
        for words in daemons:
            log = (
                stack.enter_context(open(folder / f"{words[0]}.{words[-1]}.log", "wb")) if words is not munged else None
            )
            process = subprocess.Popen(words, env=env, stdout=log or subprocess.DEVNULL, stderr=subprocess.STDOUT)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
            time.sleep(0.3 if words is munged else 0.0)
        _wait_until_idle(env, folder)
        yield env


def _wait_until_idle(env: Mapping[str, str], folder: Path) -> None:
    deadline = time.monotonic() + SECONDS
    said = ""
    while time.monotonic() < deadline:
        done = subprocess.run(
            ["sinfo", "-h", "-o", "%T %D"], env=env, capture_output=True, text=True, timeout=30, check=False
        )
        said = done.stdout + done.stderr
        if done.stdout.split() == ["idle", str(len(NODES))]:
            return
        time.sleep(0.2)
    logs = "\n".join(f"{path.name}: {path.read_text(errors='replace')[-2000:]}" for path in folder.glob("*.log"))
    raise AssertionError(f"{said}\n{logs}")
