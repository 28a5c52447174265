"""Programs that others wrote for Horovod, unedited, on the farandole of .venv: orphans.py [NAME...].

Each has an environment of its own below build/orphans, from PyPI's packages and `farandole as-horovod install`, and
runs there by horovodrun with small data. A program is left out, with the reason, if no index has its packages.

    TORCH=cuda   take PyTorch's build with CUDA (gigabytes) where no index offers the one for CPUs"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from oldest import Unavailable, link_farandole
from release import environment

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "orphans"
DATA = ROOT / "tests" / "data" / "orphans"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
DEADLINE = 900  # seconds, for one program on a busy machine
OWN = ("cloudpickle", "numpy", "rich")  # what farandole needs
# In the environments: no GPU is looked for, and each rank computes with one thread.
SETTINGS = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, kw_only=True)
class Orphan:
    """A program: its packages, its command, and a pattern of the output of each rank that has trained."""

    packages: str
    command: str
    trained: str
    ranks: int = 2
    alone: str = ""  # a package that is installed without its dependencies, of which one is the real Horovod
    sources: str = ""  # a package whose sdist has the program, in which it runs
    data: str = ""  # a program of DATA that makes the data first


ORPHANS = {
    "deepmd-kit": Orphan(
        packages="deepmd-kit[cpu]==3.2.0 mpi4py mpich",
        data="deepmd_data.py",
        command="horovodrun -np 4 dp train -m workers input.json",
        trained=r"finished training",
        ranks=4,
    ),
    "returnn": Orphan(
        packages="returnn==1.20261022.211313 dm-tree h5py tensorflow-cpu~=2.21.0",
        sources="returnn==1.20261022.211313",
        # The demo keeps its model in /tmp, from where a second run would go on.
        command="horovodrun -np 2 python rnn.py demos/demo-tf-vanilla-lstm.12ax.config ++use_horovod 1 ++num_epochs 2 "
        "++model model",
        trained=r"train epoch 2, finished after 50 steps",  # half of the 100 that one rank takes
    ),
    "open_clip": Orphan(
        packages="open_clip_torch[training]==3.3.0 torch==2.14.1+cpu torchvision==0.29.1+cpu",
        data="open_clip_data.py",
        command="horovodrun -np 2 python -m open_clip_train.main --horovod --dataset-type webdataset "
        "--train-data 'shard-{0..3}.tar' --train-num-samples 16 --batch-size 2 --epochs 1 --workers 1 "
        "--model ViT-S-32 --force-image-size 64 --precision fp32 --log-every-n-steps 1",
        trained=r"Train Epoch: 0 \[16/16",
        ranks=1,  # rank 0 reports
    ),
    "lightning-Horovod": Orphan(
        packages="pytorch-lightning==1.9.5 torch==2.13.0+cpu setuptools<81 wheel",
        alone="lightning-Horovod==0.1.0.dev0",
        command=f"horovodrun -np 2 python {DATA / 'lightning_train.py'}",
        trained=r"weights: \S+ of 2",
    ),
    "tensorpack": Orphan(
        packages="tensorpack==0.11 tensorflow~=2.21.0 tf_keras~=2.21.0",
        command=f"env TF_USE_LEGACY_KERAS=1 horovodrun -np 2 python {DATA / 'tensorpack_train.py'}",
        trained=r"weights: \[(1\.0|0\.99)",
    ),
}


def uv(*words: object) -> subprocess.CompletedProcess[str]:
    tools = environment(FOLDER / "tools", sys.executable, ["uv>=0.9"])
    return subprocess.run([str(tools / "bin" / "uv"), *map(str, words)], capture_output=True, text=True)


def install(folder: Path, orphan: Orphan) -> None:
    """Make the environment unless it is there with these packages. Raises `Unavailable`."""
    stamp, wanted = folder / "packages", f"{sys.version} {orphan.packages} {orphan.alone}"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        packages = [*OWN, *orphan.packages.split()]
        if os.environ.get("TORCH") == "cuda":
            packages = [each.replace("+cpu", "") for each in packages]
        links = [f"--find-links={each}" for each in os.environ.get("PIP_FIND_LINKS", "").split()]
        words = ["pip", "install", "-q", "--python", folder / "bin" / "python", *links]
        uv("venv", "-q", "--python", sys.executable, folder).check_returncode()
        made = uv(*words, *packages)
        if made.returncode and "+cpu" in orphan.packages:
            made = uv(*words, "--index", CPU_INDEX, "--index-strategy", "unsafe-best-match", *packages)
        if not made.returncode and orphan.alone:
            made = uv(*words, "--no-deps", "--no-build-isolation", orphan.alone)
        if made.returncode:
            raise Unavailable(f"uv: {' '.join(made.stderr.split())[-300:]}")
        stamp.write_text(wanted, encoding="utf-8")
    link_farandole(folder)
    for each in entry_points(group="console_scripts"):
        if each.name in ("farandole", "horovodrun"):
            script = folder / "bin" / each.name
            code = f"import sys\nfrom {each.module} import {each.attr}\nsys.exit({each.attr}())\n"
            script.write_text(f"#!{folder / 'bin' / 'python'}\n{code}", encoding="utf-8")
            script.chmod(0o755)
    subprocess.run([folder / "bin" / "farandole", "as-horovod", "install"], check=True, stdout=subprocess.DEVNULL)


def unpack(package: str, work: Path) -> Path:
    """Return the folder of a package's sdist, which pip downloads. Raises `Unavailable`."""
    # ":all:" in place of the name would also build from source what the package needs for its build.
    pip = ["pip", "download", "-q", "--no-deps", "--no-binary", package.partition("==")[0], "-d", str(work), package]
    made = subprocess.run([sys.executable, "-m", *pip], capture_output=True, text=True)
    if made.returncode:
        raise Unavailable(f"pip: {' '.join(made.stderr.split())[-300:]}")
    (archive,) = work.glob("*.tar.gz")
    shutil.unpack_archive(archive, work, filter="data")
    return work / archive.name.removesuffix(".tar.gz")


def run(folder: Path, orphan: Orphan) -> str:
    """Run the program in a new folder; return "" or what failed. Raises `Unavailable`."""
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    place = unpack(orphan.sources, work) if orphan.sources else work
    variables = {**os.environ, **SETTINGS, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    if orphan.data:
        subprocess.run([folder / "bin" / "python", DATA / orphan.data], cwd=place, env=variables, check=True)
    log = work / "output.txt"
    with log.open("w", encoding="utf-8") as output:
        try:
            done = subprocess.run(
                ["bash", "-c", f"exec {orphan.command}"],
                cwd=place,
                env=variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=DEADLINE,
            )
        except subprocess.TimeoutExpired:
            return f"no end within {DEADLINE} s: {log}"
    text = log.read_text(encoding="utf-8", errors="replace")
    found = len(re.findall(orphan.trained, text))
    if done.returncode or found < orphan.ranks:
        print(text[-4000:], file=sys.stderr)
        return f"exit code {done.returncode}, {found} ranks of {orphan.ranks} have trained: {log}"
    return ""


def main() -> None:
    chosen = sys.argv[1:] or [*ORPHANS]
    if unknown := set(chosen) - set(ORPHANS):
        sys.exit(f"orphans: there is no program {', '.join(sorted(unknown))}; choose from {', '.join(ORPHANS)}")
    failed = []
    for name in chosen:
        folder = FOLDER / name
        try:
            install(folder, ORPHANS[name])
            outcome = run(folder, ORPHANS[name])
        except Unavailable as missing:
            print(f"orphans: {name} is left out: {missing}", flush=True)
            continue
        print(f"orphans: {name}: {outcome or 'trained'}", flush=True)
        if outcome:
            failed.append(name)
    if failed:
        sys.exit(f"orphans: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
