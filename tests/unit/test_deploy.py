"""The manifests and the image for Kubernetes: valid by the schemas, and consistent with each other and with us."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farandole.launch.cli import run_parser
from farandole.launch.options import Given
from helpers.kubernetes import SCHEMAS

yaml = pytest.importorskip("yaml")
jsonschema = pytest.importorskip("jsonschema")

ROOT = Path(__file__).parents[2]
IMAGE, MANIFESTS = ROOT / "deploy" / "image", ROOT / "deploy" / "kubernetes"


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((MANIFESTS / name).read_text(encoding="utf-8")))


ALL = [(path.name, document["kind"]) for path in sorted(MANIFESTS.iterdir()) for document in documents(path.name)]


def manifest(name: str, kind: str) -> Any:
    (found,) = [document for document in documents(name) if document["kind"] == kind]
    return found


@pytest.mark.parametrize(("name", "kind"), ALL)
def test_a_manifest_is_valid(name: str, kind: str) -> None:
    jsonschema.Draft202012Validator(SCHEMAS[kind]).validate(manifest(name, kind))


def test_every_kind_has_a_manifest() -> None:
    assert sorted(kind for _, kind in ALL) == sorted(SCHEMAS)


BREACHES: dict[str, Callable[[Any], object]] = {
    "unknown field": lambda job: job["spec"].update(slotPerWorker=2),
    "text for a number": lambda job: job["spec"].update(slotsPerWorker="2"),
    "two launchers": lambda job: job["spec"]["mpiReplicaSpecs"]["Launcher"].update(replicas=2),
    "no worker": lambda job: job["spec"]["mpiReplicaSpecs"]["Worker"].update(replicas=0),
    "restart policy": lambda job: job["spec"]["mpiReplicaSpecs"]["Worker"].update(restartPolicy="Always"),
    "implementation": lambda job: job["spec"].update(mpiImplementation="MVAPICH"),
    "clean pod policy": lambda job: job["spec"]["runPolicy"].update(cleanPodPolicy="Never"),
    "launcher policy": lambda job: job["spec"].update(launcherCreationPolicy="Later"),
    "version": lambda job: job.update(apiVersion="kubeflow.org/v1"),
    "no replicas": lambda job: job["spec"].pop("mpiReplicaSpecs"),
    "no image": lambda job: job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0].pop("image"),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_the_schema_refuses(breach: str) -> None:
    job = copy.deepcopy(manifest("mpijob.yaml", "MPIJob"))
    BREACHES[breach](job)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, SCHEMAS["MPIJob"])


def containers(value: Any) -> list[Any]:
    """Return all containers below `value`."""
    if isinstance(value, list):
        return [each for item in value for each in containers(item)]
    if not isinstance(value, dict):
        return []
    return [*value.get("containers", []), *(each for item in value.values() for each in containers(item))]


def test_commands_are_those_of_the_image() -> None:
    """Each command runs farandole, the ssh server with the image's configuration, or a program in the image."""
    found = [
        (each, each["command"]) for name, kind in ALL for each in containers(manifest(name, kind)) if "command" in each
    ]
    found.append(({}, manifest("trainjob.yaml", "TrainJob")["spec"]["trainer"]["command"]))
    docker = (IMAGE / "Dockerfile").read_text(encoding="utf-8")
    assert len(found) == 5
    for container, words in found:
        if words[:2] == ["farandole", "run"]:
            given = run_parser().parse_args(words[2:], namespace=Given())
            assert given.command == ["python", "train.py"] and given.num_proc is None
        elif words[0] == "python":
            assert words == ["python", "train.py"]
        else:
            assert str(words).replace("'", '"').replace('", "', '", "') in docker.replace("CMD ", "")
            assert container["readinessProbe"]["tcpSocket"]["port"] == port_of("sshd_config") == port_of("ssh_config")


def port_of(name: str) -> int:
    match = re.search(r"^\s*Port (\d+)$", (IMAGE / name).read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None
    return int(match[1])


def test_keys_are_mounted_where_the_image_expects_them() -> None:
    job = manifest("mpijob.yaml", "MPIJob")["spec"]["sshAuthMountPath"]
    trainer = manifest("trainjob.yaml", "TrainingRuntime")["spec"]["mlPolicy"]["mpi"]["sshAuthMountPath"]
    server = (IMAGE / "sshd_config").read_text(encoding="utf-8")
    assert job == trainer == "/home/mpiuser/.ssh"
    assert f"HostKey {job}/id_rsa\n" in server and f"AuthorizedKeysFile {job}/authorized_keys\n" in server


def test_the_dockerfile_copies_files_that_are_there() -> None:
    lines = (IMAGE / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = [
        word for line in lines if line.startswith("COPY") for word in line.split()[1:-1] if not word.startswith("--")
    ]
    assert len(copied) >= 6
    sent = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for name in copied:
        assert name == "dist" or (ROOT / name).exists(), name  # `make wheel` makes dist/
        assert f"!{name.partition('/')[0]}" in sent, name


def test_pods_of_the_indexed_job_find_rank_0() -> None:
    job, service = manifest("indexed-job.yaml", "Job"), manifest("indexed-job.yaml", "Service")
    spec, name = job["spec"], job["metadata"]["name"]
    env = {each["name"]: each.get("value") for each in spec["template"]["spec"]["containers"][0]["env"]}
    host, _, port = env["FARANDOLE_RENDEZVOUS"].partition(":")
    subdomain = spec["template"]["spec"]["subdomain"]
    assert host == f"{name}-0.{subdomain}" and subdomain == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(env["FARANDOLE_SIZE"])
    assert spec["template"]["spec"]["containers"][0]["ports"] == [{"containerPort": int(port)}]
