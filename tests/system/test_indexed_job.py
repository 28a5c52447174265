"""Pods of a Kubernetes Indexed Job as network namespaces, with the host names that a kubelet and a Service give."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from namespaces import bridge, inside, namespaces, problem

from helpers.ssh_hosts import net_of

pytestmark = [
    pytest.mark.native,
    pytest.mark.slow,
    pytest.mark.skipif(bool(problem()), reason=problem() or "hosts"),
]

PROGRAM = Path(__file__).parents[2] / "deploy" / "image" / "train.py"
DOMAIN = "train.team.svc.cluster.local"
POD = 'hostname {name}; mount --make-rprivate /; mount --bind {hosts} /etc/hosts; exec "$@"'


def test_pods_find_rank_0_by_its_name(tmp_path: Path) -> None:
    """Rank 0 starts last, and the Service publishes its name only then."""
    with namespaces(3) as spaces, bridge(spaces) as address:
        files = [tmp_path / f"hosts-{index}" for index in range(3)]
        pods: list[subprocess.Popen[str]] = []
        addresses = [f"{net_of(address)}{index + 1}" for index in range(3)]
        try:
            for index in (1, 2, 0):
                name = f"train-{index}"
                files[index].write_text(f"127.0.0.1 localhost\n{addresses[index]} {name}.{DOMAIN} {name}\n")
                script = POD.format(name=name, hosts=files[index])
                words = [*inside(spaces[index]), "unshare", "--mount", "--uts", "sh", "-ec", script, "sh"]
                job = {"JOB_COMPLETION_INDEX": str(index), "FARANDOLE_SIZE": "3", "FARANDOLE_SECRET": "5a" * 32}
                process = subprocess.Popen(
                    [*words, sys.executable, str(PROGRAM)],
                    env={**os.environ, **job},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                pods.append(process)
            time.sleep(3.0)  # the pods have looked for the name by then
            assert [pod.poll() for pod in pods] == [None] * 3, [pod.communicate(timeout=10) for pod in pods[:2]]
            for index in (1, 2):
                with files[index].open("a") as hosts:  # its content changes, the file that is mounted stays
                    hosts.write(f"{addresses[0]} train-0.{DOMAIN}\n")
            said = [pod.communicate(timeout=100) for pod in pods]
        finally:
            for pod in pods:
                pod.kill()
                pod.communicate()
    assert [pod.returncode for pod in pods] == [0, 0, 0], said
    assert sorted(output for output, _ in said) == [f"rank {rank} of 3: the ranks add up to 3\n" for rank in range(3)]
