"""Spark's own servers for tests: a Spark Connect server, and a standalone master with its worker."""

import ctypes
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from spark_archive import java_options

from helpers.programs import warm_spark

LOCALHOST = "127.0.0.1"
PR_SET_PDEATHSIG = 1
STARTED = 90  # seconds for a server to start on a busy machine

_CONNECT = re.compile(r"Spark Connect server started at: \S*?(\d+)$", re.MULTILINE)
_MASTER = re.compile(r"Starting Spark master at (spark://\S+)$", re.MULTILINE)
_WORKER = re.compile(r"Successfully registered with master (spark://\S+)$", re.MULTILINE)

_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def connect_server(folder: Path, settings: Mapping[str, str]) -> Iterator[str]:
    """Run a Spark Connect server with its files in `folder`; yield its URL."""
    given = {
        "spark.master": "local[2]",
        "spark.driver.host": LOCALHOST,
        "spark.driver.bindAddress": LOCALHOST,
        "spark.connect.grpc.binding.address": LOCALHOST,
        "spark.connect.grpc.binding.port": "0",
        "spark.local.dir": str(folder),
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
        "spark.python.daemon.module": "helpers.warm_daemon",
        **settings,
    }
    words = [word for name, value in given.items() for word in ("--conf", f"{name}={value}")]
    jar = next(_spark().glob("jars/spark-connect_*.jar"))
    command = ["bin/spark-submit", *words, "--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    with _server("connect", [*command, str(jar)], folder, _CONNECT) as port:
        yield f"sc://{LOCALHOST}:{port}"


@contextmanager
def standalone_cluster(folder: Path, *, cores: int) -> Iterator[str]:
    """Run a standalone master and a worker with `cores` cores, with their files in `folder`; yield the URL."""
    with ExitStack() as stack:
        master = ["org.apache.spark.deploy.master.Master", "--host", LOCALHOST, "--port", "0", "--webui-port", "0"]
        url = stack.enter_context(_server("master", ["bin/spark-class", *master], folder, _MASTER))
        worker = ["org.apache.spark.deploy.worker.Worker", "--host", LOCALHOST, "--webui-port", "0"]
        limits = ["--cores", str(cores), "--memory", f"{cores}g", "--work-dir", str(folder / "work")]
        command = ["bin/spark-class", *worker, *limits, url]
        stack.enter_context(_server("worker", command, folder, _WORKER))
        yield url


def _spark() -> Path:
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


@contextmanager
def _server(name: str, command: Sequence[str], folder: Path, announced: re.Pattern[str]) -> Iterator[str]:
    """Run a server until the block ends; yield the first group of `announced` in its log."""
    env = {
        **os.environ,
        **warm_spark("torch"),
        "SPARK_HOME": str(_spark()),
        "SPARK_LOCAL_IP": LOCALHOST,
        "SPARK_DAEMON_JAVA_OPTS": java_options(),
        "PYSPARK_PYTHON": sys.executable,
    }
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(_spark() / command[0]), *command[1:]], env=env, cwd=folder, stdin=subprocess.DEVNULL,
            stdout=out, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_end_with_parent,
        )  # fmt: skip
    try:
        give_up = time.monotonic() + STARTED
        while (found := announced.search(log.read_text(errors="replace"))) is None:
            assert process.poll() is None and time.monotonic() < give_up, log.read_text(errors="replace")[-3000:]
            time.sleep(0.05)
        yield found[1]
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):  # expected: no process is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _end_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
