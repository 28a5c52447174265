"""Facts of one machine: farandole, frameworks, libraries, launchers, limits."""

import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from farandole.cores import available_cores
from farandole.launch.doctor.libraries import LIBRARIES
from farandole.launch.installed import installed_version, program_path
from farandole.meeting.launched.interconnects import find_interconnects
from farandole.other_launchers import PROGRAMS
from farandole.topology import own_addresses

SECONDS = 120  # for a framework to load
LEAST_FILES = 1024
LEAST_MEMORY = 64 << 20  # bytes of /dev/shm, which loaders of PyTorch use; Docker's default

# The package, its title, and a program that loads the library of the binding.
FRAMEWORKS = (
    ("numpy", "NumPy", "import farandole.numpy"),
    ("torch", "PyTorch", "import farandole.torch"),
    ("tensorflow", "TensorFlow", "from farandole.tensorflow.plugin import operations; operations()"),
    ("keras", "Keras", "import farandole.keras"),
    ("jax", "JAX", "from farandole.jax.plugin import register; register()"),
    ("lightning", "Lightning", "import farandole.lightning"),
    ("ray", "Ray", "import farandole.ray; farandole.ray.RayExecutor"),
    ("pyspark", "Spark", "import farandole.spark; farandole.spark.run"),
)
OLDEST_JAVA = 17  # that Spark 4 runs on


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the report; `problem` says what is wrong and what helps, if anything."""

    topic: str
    name: str
    value: str
    problem: str = ""


def examine(load: bool = True) -> list[Fact]:
    """Return the facts of this machine. With `load` each framework's binding is loaded, in a process of its own."""
    with ThreadPoolExecutor(2) as pool:  # two at a time, because each program has many threads of its own
        frameworks = pool.map(lambda each: _framework(*each, load=load), FRAMEWORKS)
        return [*_farandole(), *frameworks, _java(), *_libraries(), *map(_launcher, ("ssh", *PROGRAMS)), *_machine()]


def _farandole() -> Iterator[Fact]:
    core = _run("import farandole._native as core; print(core.__file__)")
    yield Fact("farandole", "version", version("farandole"))
    yield Fact("farandole", "Python", f"{platform.python_version()} ({sys.executable})")
    yield Fact("farandole", "native core", core.text, core.problem)


def _framework(package: str, title: str, program: str, *, load: bool) -> Fact:
    if find_spec(package) is None:
        return Fact("frameworks", title, "not installed")
    installed = installed_version(package) or "of an unknown version"
    if not load:
        return Fact("frameworks", title, installed)
    outcome = _run(program)
    problem = f"the binding does not load: {outcome.problem}" if outcome.problem else ""
    return Fact("frameworks", title, installed if problem else f"{installed}, the binding loads", problem)


def _java() -> Fact:
    """Return the Java that Spark would start; a problem only where Spark is installed."""
    home = os.environ.get("JAVA_HOME")
    path = shutil.which("java", path=f"{home}/bin" if home else None)
    needs = f"Spark needs Java {OLDEST_JAVA} or newer; install it, or set JAVA_HOME" if find_spec("pyspark") else ""
    if path is None:
        return Fact("frameworks", "Java", f"not found in {home}/bin (JAVA_HOME)" if home else "not found", needs)
    done = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=SECONDS, check=False)
    found = re.search(r'version "((\d+)[^"]*)"', done.stderr)
    if found is None:
        return Fact("frameworks", "Java", path, f"it does not tell its version: {done.stderr.strip()[:200]}")
    return Fact("frameworks", "Java", f"{found[1]} ({path})", needs if int(found[2]) < OLDEST_JAVA else "")


def _libraries() -> Iterator[Fact]:
    outcome = _run("-m", "farandole.launch.doctor.libraries")
    if outcome.problem:
        yield Fact("libraries", "all", "", outcome.problem)
        return
    found = json.loads(outcome.text)
    for title in LIBRARIES:
        path, about = found.get(title, ("not found", ""))
        yield Fact("libraries", title, f"{path} ({about})" if about else path)


def _launcher(name: str) -> Fact:
    path = program_path(name)
    problem = "ranks cannot be started on other hosts; install OpenSSH's client" if name == "ssh" and not path else ""
    return Fact("launchers", name, path or "not found", problem)


def _machine() -> Iterator[Fact]:
    yield Fact("machine", "name", socket.gethostname())
    yield Fact("machine", "system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    bound, usable = len(os.sched_getaffinity(0)), available_cores()
    quota = f", {usable} by the container's quota" if usable < bound else ""
    yield Fact("machine", "cores", f"{bound} of {os.cpu_count()}{quota}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Fact("machine", "memory", f"{memory / (1 << 30):.1f} GiB")
    yield _shared_memory(Path("/dev/shm"))
    yield from _limits()
    yield Fact("machine", "addresses", ", ".join(own_addresses()))
    ports = "; ".join(map(str, find_interconnects())) or "none that MPI uses better than TCP does"
    yield Fact("machine", "interconnects", ports)


def _shared_memory(folder: Path) -> Fact:
    try:
        about = os.statvfs(folder)
    except OSError as error:
        return Fact("machine", str(folder), f"{error.strerror}")
    total, free = about.f_frsize * about.f_blocks, about.f_frsize * about.f_bavail
    value = f"{free / (1 << 20):.0f} of {total / (1 << 20):.0f} MiB free"
    problem = "loaders of PyTorch need more; with Docker: --shm-size=1g" if free < LEAST_MEMORY else ""
    return Fact("machine", str(folder), value, problem)


def _limits() -> Iterable[Fact]:
    limits: tuple[tuple[str, int, Callable[[int], str]], ...] = (
        (
            "open files (ulimit -n)",
            resource.RLIMIT_NOFILE,
            lambda most: f"large jobs need more; ulimit -n {LEAST_FILES}" if most < LEAST_FILES else "",
        ),
        ("processes (ulimit -u)", resource.RLIMIT_NPROC, lambda most: ""),
        ("locked memory (ulimit -l)", resource.RLIMIT_MEMLOCK, lambda most: ""),
        (
            "file size (ulimit -f)",
            resource.RLIMIT_FSIZE,
            lambda most: "it limits the ranks' shared memory, too; ulimit -f unlimited",
        ),
    )
    for name, number, problem_of in limits:
        most = resource.getrlimit(number)[0]
        unlimited = most == resource.RLIM_INFINITY
        yield Fact("machine", name, "unlimited" if unlimited else str(most), "" if unlimited else problem_of(most))


@dataclass(frozen=True, slots=True)
class _Outcome:
    text: str
    problem: str = ""


def _run(*words: str) -> _Outcome:
    """Run a program, or the module after "-m", with this Python; return its output, or the last line of its errors."""
    arguments = words if words[0] == "-m" else ("-c", *words)
    try:
        done = subprocess.run(
            [sys.executable, "-P", *arguments], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return _Outcome("", f"it took more than {SECONDS} s")
    if done.returncode == 0:
        return _Outcome(done.stdout.strip())
    errors = done.stderr.strip().splitlines()
    return _Outcome("", errors[-1] if errors else f"Python ended with code {done.returncode}")
