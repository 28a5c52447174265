"""Builder for the images of deploy/ that needs root but no container engine.

    python tools/images.py [--target STAGE] [--build-arg NAME=VALUE]... [COMMAND...]

builds the image and runs COMMAND, or a shell, in it. Each instruction of the Dockerfile runs with chroot in a mounted
overlay, as the image's user. A minimal Debian with a copy of this interpreter stands in for the base image
python:X.Y-slim-bookworm. The build context is the committed tree with the current changes to tracked files, and dist/.
Layers are kept below build/images; an instruction runs again only if it, an earlier one or its files have changed. pip
and apt use the settings and the mirror of this machine."""

import argparse
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dockerfile import Instruction, Stage, read

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "images"
DOCKERFILE = ROOT / "deploy" / "image" / "Dockerfile"
ARGUMENTS = {"PYTHON": "{}.{}".format(*sys.version_info[:2])}
# Packages that python:X.Y-slim-bookworm has on top of Debian's minimal system.
PACKAGES = (
    *("ca-certificates", "libbz2-1.0", "libffi8", "liblzma5", "libncursesw6", "libreadline8", "libsqlite3-0"),
    *("libssl3", "libuuid1", "netbase", "tzdata"),
)
PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
# Shell code that mounts the overlay, /proc, /dev and /run. $1 is the container's folder; a command follows.
MOUNTS = """
mount --make-rprivate /
mount -t overlay overlay -o "lowerdir=$LOWER,upperdir=$1/upper,workdir=$1/work" "$1/root"
mount -t proc proc "$1/root/proc"
mount --rbind /dev "$1/root/dev"
mount -t tmpfs tmpfs "$1/root/run"
"""


@dataclass(frozen=True, slots=True)
class Image:
    """Layers, uppermost first, and the settings of its containers."""

    layers: tuple[Path, ...]
    env: Mapping[str, str] = field(default_factory=lambda: {"PATH": PATH})
    user: str = "0"
    folder: str = "/"
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    def words(
        self,
        place: Path,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        mounts: Mapping[str, str] | None = None,
        shared: Sequence[Path] = (),
        set_up: str = "",
    ) -> list[str]:
        """Return the command line that runs `command` in a container, without the image's entry point.

        The container writes its files below `place`; later containers may use the same `place`. `mounts` maps paths
        in the container to paths of this machine, mounted read-only; `shared` are folders with the same path in both,
        mounted writable. `set_up` is shell code that runs first, as root.
        The container's processes end with the process. It uses this machine's network, host names and processors."""
        for name in ("upper", "work", "root"):
            (place / name).mkdir(parents=True, exist_ok=True)
        place.chmod(0o755)
        inside = {**self.env, **({} if env is None else env)}
        script = f"LOWER={':'.join(map(str, self.layers))}\n{MOUNTS}"
        names = {each: each for each in ("/etc/hosts", "/etc/resolv.conf")}
        for target, source in {**names, **({} if mounts is None else mounts)}.items():
            script += _mount(source, target, "ro")
        for each in shared:
            script += _mount(str(each), str(each), "rw")
        script += f'{set_up}\nroot=$1\nshift\nexec "$@"'
        variables = [f"{name}={value}" for name, value in inside.items()]
        group = f"--userspec={self.user}:{self.user}"  # users of our images have groups of their own
        chroot = ["chroot", group, str(place / "root"), "env", "-i", f"--chdir={self.folder}", *variables]
        kernel = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
        return [*kernel, "sh", "-ec", script, "sh", str(place), *chroot, *command]


def _mount(source: str, target: str, option: str) -> str:
    target = shlex.quote(target.lstrip("/"))
    make = f'mkdir -p "$1/root/"{target}'
    if not Path(source).is_dir():
        make = f'mkdir -p "$(dirname "$1/root/"{target})"; touch "$1/root/"{target}'
    return f'{make}\nmount --bind -o {option} {shlex.quote(source)} "$1/root/"{target}\n'


def problem() -> str:
    """Return why no image can be built on this machine, or "" if one can."""
    missing = [name for name in ("debootstrap", "unshare", "chroot", "git") if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        return f"images need root and {', '.join(missing) or 'unshare'} (packages debootstrap, util-linux, git)"
    if sys.base_prefix == "/usr":
        return "images need a Python with a folder of its own, not /usr: they get a copy of it"
    if not [*(ROOT / "dist").glob("*.whl")]:
        return "images need the wheels that make wheel puts into dist/"
    return ""


def build(target: str = "", arguments: Mapping[str, str] | None = None) -> Image:
    """Build a stage of the Dockerfile, "" for the last one. Takes minutes if layers are missing.

    The first extra index in pip's configuration, if any, is the default of the build argument INDEX.
    Raises `CalledProcessError` if an instruction fails, `ValueError` for an instruction unknown to this tool."""
    context = _context()
    built: dict[str, Image] = {}
    indexes = _pip_settings()[0].get("PIP_EXTRA_INDEX_URL", "").split()
    given = {**ARGUMENTS, **({"INDEX": indexes[0]} if indexes else {}), **({} if arguments is None else arguments)}
    stages = read(DOCKERFILE, given)
    for stage in stages:
        # "wheels" is the stage whose files the others use.
        if stage.name in (target, "wheels"):
            built[stage.name] = _build_stage(stage, context, built)
    return built[target]


def _build_stage(stage: Stage, context: Path, built: Mapping[str, Image]) -> Image:
    image = _base(stage.base)
    for each in stage.instructions:
        if each.name == "ENV":
            image = replace(image, env={**image.env, **dict(word.split("=", 1) for word in each.words())})
        elif each.name == "USER":
            image = replace(image, user=each.rest)
        elif each.name == "ENTRYPOINT":
            image = replace(image, entrypoint=tuple(each.words()))
        elif each.name == "CMD":
            image = replace(image, command=tuple(each.words()))
        elif each.name == "WORKDIR":
            image = replace(_add(image, each, f'mkdir -p "$1/root{each.rest}"', ()), folder=each.rest)
        elif each.name == "COPY":
            image = _copy(image, each, context)
        elif each.name == "RUN":
            image = _run(image, each, stage.arguments, built)
        else:
            raise ValueError(f"{DOCKERFILE}:{each.line}: {each.name} is not known here")
    return image


def _run(image: Image, each: Instruction, arguments: Mapping[str, str], built: Mapping[str, Image]) -> Image:
    mounted = ""
    below: tuple[Path, ...] = ()
    if each.option("mount"):
        mount = dict(word.split("=", 1) for word in each.option("mount").split(","))
        below = built[mount["from"]].layers
        mounted = f'mkdir -p "$1/root{mount["target"]}" "$1/from"\n'
        mounted += f'mount -t overlay overlay -o ro,lowerdir={":".join(map(str, below))} "$1/from"\n'
        mounted += f'mount --bind "$1/from{mount["source"]}" "$1/root{mount["target"]}"'
    settings, paths = _pip_settings()
    command = ("sh", "-c", each.rest)
    mounts = {path: path for path in paths} | {CERTIFICATES: CERTIFICATES}
    env = {**arguments, **settings, "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count())}
    return _add(image, each, mounted, [str(below), str(sorted(arguments.items()))], command, mounts, env)


def _copy(image: Image, each: Instruction, context: Path) -> Image:
    *sources, target = each.words()
    script, facts = "", []
    for name in sources:
        facts.append(_digest(context / name))
        place = f'"$1/root{target}"'
        if (context / name).is_dir():
            script += f"mkdir -p {place}\ncp -r --preserve=mode {shlex.quote(str(context / name))}/. {place}\n"
        else:
            script += f'mkdir -p "$(dirname "$1/root{target}/file")"\n' if target.endswith("/") else ""
            script += f"cp --preserve=mode {shlex.quote(str(context / name))} {place}\n"
    if each.option("chmod"):
        script += f'chmod -R {each.option("chmod")} "$1/root{target}"\n'
    if each.option("chown"):
        script += f'chown -R {each.option("chown")}:{each.option("chown")} "$1/root{target}"\n'
    return _add(image, each, script, facts)


def _add(
    image: Image,
    each: Instruction,
    script: str,
    facts: Iterable[str],
    command: Sequence[str] = ("true",),
    mounts: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Image:
    """Return the image with one more layer, made by `script` and then `command` unless it is in the cache."""
    text = "\0".join([str(image), each.name, each.rest, str(each.options), *facts])
    layer = FOLDER / "layers" / hashlib.sha256(text.encode()).hexdigest()[:12]
    if not (layer / "complete").exists():
        print(f"images: line {each.line}: {each.name} {each.rest}", file=sys.stderr, flush=True)
        shutil.rmtree(layer, ignore_errors=True)
        words = image.words(layer, command, env=env, mounts=mounts, set_up=script)
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
        (layer / "complete").touch()
    return replace(image, layers=(layer / "upper", *image.layers))


def _base(name: str) -> Image:
    """Return the stand-in for python:X.Y-slim-SUITE."""
    found = re.fullmatch(r"python:(\d+\.\d+)-slim-(\w+)", name)
    if found is None or found[1] != ARGUMENTS["PYTHON"]:
        raise ValueError(
            f"only this Python stands in for a base image, python:{ARGUMENTS['PYTHON']}-slim-SUITE: {name}"
        )
    base = FOLDER / f"base-{found[1]}-{found[2]}"
    if not (base / "complete").exists():
        print(f"images: {name}", file=sys.stderr, flush=True)
        shutil.rmtree(base, ignore_errors=True)
        root = base / "upper"
        root.mkdir(parents=True)
        words = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", found[2], str(root)]
        subprocess.run([*words, _mirror(found[2])], check=True, stdout=subprocess.DEVNULL)
        _put_python(root, found[1])
        (base / "complete").touch()
    return Image((base / "upper",))


def _put_python(root: Path, version: str) -> None:
    prefix, name = Path(sys.base_prefix), f"python{version}"
    shutil.copy2(prefix / "bin" / name, root / "usr/local/bin" / name)
    for each in ("python3", "python"):
        (root / "usr/local/bin" / each).symlink_to(name)
    ignored = shutil.ignore_patterns("site-packages", "__pycache__", "test", "idlelib")
    shutil.copytree(prefix / "lib" / name, root / "usr/local/lib" / name, ignore=ignored, symlinks=True)
    shutil.copytree(prefix / "include" / name, root / "usr/local/include" / name)
    for library in (prefix / "lib").glob(f"libpython{version}.so*"):
        shutil.copy2(library, root / "usr/local/lib")
    (root / "usr/local/lib" / name / "site-packages").mkdir()
    inside = ["chroot", str(root), "/usr/local/bin/python3"]
    subprocess.run(["chroot", str(root), "ldconfig"], check=True)
    subprocess.run([*inside, "-m", "ensurepip", "--default-pip"], check=True, stdout=subprocess.DEVNULL)
    # The official images of Python 3.12 and newer have no setuptools.
    subprocess.run([*inside, "-m", "pip", "uninstall", "-qy", "setuptools"], check=True)


def _mirror(suite: str) -> str:
    policy = subprocess.run(["apt-cache", "policy"], check=True, capture_output=True, text=True).stdout
    found = re.search(rf"(\S+://\S+) {suite}/main ", policy)
    if found is None:
        raise ValueError(f"apt of this machine has no mirror of Debian's {suite}")
    return found[1]


@functools.cache
def _pip_settings() -> tuple[dict[str, str], list[str]]:
    """Return pip's settings on this machine as variables, and the files and folders that they name."""
    words = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    found = re.findall(r"^(?:global|install|:env:)\.([\w.-]+?)='(.*)'$", listing, re.MULTILINE)
    settings = {f"PIP_{name.lstrip('.').replace('-', '_').upper()}": value for name, value in found}
    places = [word for value in settings.values() for word in value.split()]
    # An index in a folder links to files in the folder above it.
    paths = [Path(each[7:]).parent if each.startswith("file:///") else Path(each) for each in places]
    return settings, sorted({str(each) for each in paths if each.is_absolute() and each.exists()})


def _context() -> Path:
    """Return a folder with a copy of the files that git tracks, in their current state."""

    def git(*words: str) -> bytes:
        return subprocess.run(["git", *words], check=True, cwd=ROOT, stdout=subprocess.PIPE).stdout

    tree = git("stash", "create").decode().strip() or "HEAD"
    context = FOLDER / "context"
    shutil.rmtree(context, ignore_errors=True)
    context.mkdir(parents=True)
    unpack = ["tar", "--extract", "--no-same-owner", "--directory", str(context)]
    subprocess.run(unpack, check=True, input=git("archive", tree))
    shutil.copytree(ROOT / "dist", context / "dist")
    return context


def _digest(path: Path) -> str:
    files = sorted(each for each in ([path] if path.is_file() else path.rglob("*")) if each.is_file())
    found = hashlib.sha256()
    for each in files:
        found.update(f"{each.relative_to(path)} {each.stat().st_mode:o} {each.stat().st_size}\n".encode())
        found.update(each.read_bytes())
    return found.hexdigest()


def main() -> int:
    """Build an image and run a command in it; return the command's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="", help="a stage of the Dockerfile; default: the last one")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if problem():
        print(f"images: {problem()}", file=sys.stderr)
        return 1
    image = build(options.target, dict(each.split("=", 1) for each in options.build_arg))
    shutil.rmtree(FOLDER / "container", ignore_errors=True)
    words = image.words(FOLDER / "container", options.command or ["bash"])
    return subprocess.run(words).returncode


if __name__ == "__main__":
    sys.exit(main())
