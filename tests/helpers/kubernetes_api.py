"""The part of Kubernetes' API that Spark's driver uses, with pods that run as processes of this machine."""

import json
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

ADDRESS = "127.0.0.1"  # of every pod


@dataclass(frozen=True)
class Pod:
    """Arguments, environment and files of a pod's container."""

    name: str
    image: str
    words: Sequence[str]  # arguments of the entry point
    env: Mapping[str, str]
    mounts: Mapping[str, Mapping[str, str]]  # files of ConfigMaps, by folder

    @classmethod
    def of(cls, spec: Mapping[str, Any], config_maps: Mapping[str, Mapping[str, str]]) -> "Pod":
        name, (container,) = spec["metadata"]["name"], spec["spec"]["containers"]
        env = {}
        for each in container["env"]:
            path = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            facts = {None: each.get("value", ""), "status.podIP": ADDRESS, "metadata.name": name}
            env[each["name"]] = facts[path]
        maps = {each["name"]: each["configMap"]["name"] for each in spec["spec"]["volumes"] if each.get("configMap")}
        mounts = {
            each["mountPath"]: config_maps[maps[each["name"]]]
            for each in container["volumeMounts"]
            if each["name"] in maps
        }
        return cls(name, container["image"], container["args"], env, mounts)


@dataclass
class Cluster:
    """The created pods and ConfigMaps."""

    start: Callable[[Pod], "subprocess.Popen[str]"]
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    processes: dict[str, "subprocess.Popen[str]"] = field(default_factory=dict)
    config_maps: dict[str, dict[str, str]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    def create(self, kind: str, given: dict[str, Any]) -> dict[str, Any]:
        name = given["metadata"]["name"]
        if kind == "configmaps":
            self.config_maps[name] = given["data"]
            return given
        pod = Pod.of(given, self.config_maps)
        self.processes[name] = self.start(pod)
        given["metadata"] |= {"uid": name, "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
        self.pods[name] = given
        return given

    def list(self) -> dict[str, Any]:
        for name, pod in self.pods.items():
            code = self.processes[name].poll()
            state: dict[str, Any] = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
            container = {"name": pod["spec"]["containers"][0]["name"], "ready": code is None, "state": state}
            phase = "Running" if code is None else "Failed" if code else "Succeeded"
            pod["status"] = {"phase": phase, "podIP": ADDRESS, "containerStatuses": [container]}
        items = list(self.pods.values())
        return {"apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": items}

    def end(self) -> None:
        for each in self.processes.values():
            each.kill()
            each.wait()


@contextmanager
def serve(cluster: Cluster) -> Iterator[str]:
    """Serve the API of `cluster` without a password; yield its URL. The block's end kills the pods."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, content: Mapping[str, Any], status: int = 200) -> None:
            cluster.requests.append(f"{self.command} {self.path} {status}")
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def given(self) -> Any:
            return json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")

        def kind(self) -> str:
            return urlsplit(self.path).path.split("/")[5]  # /api/v1/namespaces/NAME/KIND

        def do_POST(self) -> None:
            given = self.given()
            self.answer(cluster.create(self.kind(), given), 201)

        def do_GET(self) -> None:
            if self.kind() == "pods":
                self.answer(cluster.list())
            else:
                self.answer({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": []})

        def do_DELETE(self) -> None:
            self.given()
            self.answer({"apiVersion": "v1", "kind": "Status", "status": "Success"})

        def do_PATCH(self) -> None:
            self.given()
            self.answer({"apiVersion": "v1", "kind": "Status", "status": "Success"})

        def log_message(self, format: str, *args: object) -> None:
            return None  # `cluster.requests` lists them

    with ThreadingHTTPServer((ADDRESS, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://{ADDRESS}:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
            cluster.end()
