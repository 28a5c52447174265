"""Simulated hosts with a real sshd: network namespaces, some of them with another file system."""

import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from namespaces import DEVICE, bridge, inside, ip, namespaces
from namespaces import problem as problem_of_namespaces

import farandole
from helpers.hosts import SECOND_DEVICE

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin")
PORT = 2222
PACKAGES = Path(sysconfig.get_path("purelib"))


def problem() -> str:
    """Return why this machine cannot have such hosts, or "" if it can."""
    if SSHD is None or shutil.which("ssh") is None:
        return "no sshd (package openssh-server)"
    return problem_of_namespaces()


@dataclass(frozen=True)
class Hosts:
    """Two hosts with an sshd each, the configuration of ssh for them, and a third host without sshd.

    More servers on the first host have another file system: without Python, without farandole, or with another version
    of it."""

    names: tuple[str, str]  # addresses
    spaces: tuple[str, str, str]  # network namespaces
    second: str  # the network of SECOND_DEVICE
    config: Path

    @property
    def options(self) -> list[str]:
        return ["--ssh-command", f"ssh -F {self.config}"]

    def slots(self, count: int) -> str:
        return ",".join(f"{name}:{count}" for name in self.names)


def net_of(address: str) -> str:
    return address.rpartition(".")[0] + "."


def key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True, timeout=30)
    return path


def other_file_systems(folder: Path) -> dict[str, tuple[Path, Path]]:
    """Return, by alias of a host, the path that its file system replaces, and the path that is there instead."""
    (folder / "empty").mkdir()
    (folder / "file").touch()
    source = Path(farandole.__file__).parent
    (metadata,) = PACKAGES.glob("farandole-*.dist-info/METADATA")
    (folder / "METADATA").write_text(
        metadata.read_text().replace(f"Version: {farandole.__version__}", "Version: 0.0.9")
    )
    return {
        "no-python": (Path(sys.executable).resolve(), folder / "file"),
        "no-farandole": (source, folder / "empty"),
        "other-version": (metadata, folder / "METADATA"),
    }


def write_client_config(folder: Path, addresses: list[str], aliases: Iterable[str]) -> Path:
    known, config = folder / "known_hosts", folder / "config"
    public = (folder / "server.pub").read_text()
    known.write_text("".join(f"{each} {public}" for each in (*(f"[{name}]:{PORT}" for name in addresses), "first")))
    first = f"  HostName {addresses[0]}\n  HostKeyAlias first\n"
    ports = "".join(f"Host {alias}\n{first}  Port {PORT + 1 + place}\n" for place, alias in enumerate(aliases))
    config.write_text(
        f"{ports}Host alias\n{first}"
        f"Host wrong-key\n{first}  IdentityFile {folder / 'stranger'}\n"
        f"Host * !wrong-key\n  IdentityFile {folder / 'mine'}\n"
        f"Host *\n  User root\n  Port {PORT}\n  IdentitiesOnly yes\n  UserKnownHostsFile {known}\n"
        "  StrictHostKeyChecking yes\n"
    )
    return config


def serve(
    folder: Path, space: str, port: int = PORT, hidden: tuple[Path, Path] | None = None, *, more: str = ""
) -> "subprocess.Popen[bytes]":
    """Start an sshd in the namespace `space`; `hidden` replaces a path, `more` are lines of its configuration."""
    config = folder / f"sshd_config.{port}"
    config.write_text(
        f"Port {port}\nHostKey {folder / 'server'}\nAuthorizedKeysFile {folder / 'mine.pub'}\nPidFile none\n"
        "StrictModes no\nUsePAM no\nClientAliveInterval 1\nClientAliveCountMax 3\n"
        f"{more}"
    )
    words = f"exec {SSHD} -D -e -f {config}"  # exec: the started process becomes the server
    if hidden is not None:
        there, other = hidden
        words = f"mount --make-rprivate / && mount --bind {other} {there} && {words}"
    wall = ("unshare", "--mount") if hidden is not None else ()
    return subprocess.Popen([*inside(space), *wall, "sh", "-c", words], stderr=subprocess.DEVNULL)


@contextmanager
def serving_hosts(folder: Path) -> Iterator[Hosts]:
    """Start the hosts' servers, with keys and configurations in `folder`; the block's end stops them."""
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("mine", "stranger", "server"):
        key(folder / name)
    servers: list[subprocess.Popen[bytes]] = []
    with namespaces(3) as spaces, bridge(spaces) as address, bridge(spaces, SECOND_DEVICE) as second:
        addresses = [f"{net_of(address)}{place + 1}" for place in range(2)]
        for place, space in enumerate(spaces):
            ip("-n", space, "address", "add", f"fd77::{place + 1}/64", "dev", DEVICE, "nodad")
        others = other_file_systems(folder)
        config = write_client_config(folder, [*addresses, "fd77::1", "fd77::2"], others)
        try:
            servers += [serve(folder, space) for space in spaces[:2]]
            for place, hidden in enumerate(others.values()):
                servers.append(serve(folder, spaces[0], PORT + 1 + place, hidden))
            for name in (*addresses, *others):
                wait_for_server(config, name)
            yield Hosts((addresses[0], addresses[1]), (spaces[0], spaces[1], spaces[2]), net_of(second), config)
        finally:
            for each in servers:
                each.kill()
                each.wait()
        end = time.monotonic() + 20  # an ssh whose link was cut ends later than its server
        while (left := [line for line in command_lines() if str(folder).encode() in line]) and time.monotonic() < end:
            time.sleep(0.05)
        assert left == []


def wait_for_server(config: Path, name: str) -> None:
    for _ in range(100):
        words = ["ssh", "-F", str(config), name, "true"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode == 0:
            return
        time.sleep(0.1)
    raise AssertionError(done.stderr)


def command_lines() -> Iterator[bytes]:
    """Yield the command line of each process of this machine."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            yield (entry / "cmdline").read_bytes()
        except OSError:
            continue  # the process has ended
