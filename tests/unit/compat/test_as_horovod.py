"""The packages that `farandole as-horovod` installs: known to pip, imported by any process, removed without a trace."""

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

import farandole
from farandole.compat.answers import PACKAGES
from farandole.compat.as_horovod import install, remove, run_as_horovod, status
from farandole.errors import ConfigError


def run(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], **variables}
    command = [str(word) for word in words]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment, check=False)


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A new virtual environment that has farandole: its Python, and its site-packages."""
    venv.create(tmp_path / "venv", symlinks=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "farandole").mkdir()
    for folder in farandole.__path__:  # an editable installation has the extension in a folder of its own
        for each in Path(folder).iterdir():
            if not (site / "farandole" / each.name).exists():
                (site / "farandole" / each.name).symlink_to(each)
    facts = site / "farandole-0.1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: farandole\nVersion: 0.1.0\n")
    yield tmp_path / "venv" / "bin" / "python", site
    shutil.rmtree(tmp_path / "venv")


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "farandole" not in path.parts}


def pip(python: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, *words)


def test_pip_and_programs_know_the_packages(environment: tuple[Path, Path]) -> None:
    python, site = environment
    before = contents(site)
    command = (python, "-m", "farandole.launch.cli", "as-horovod")
    done = run(*command, "install")
    assert done.returncode == 0 and f"horovod 0.28.1: installed in {site}" in done.stdout, done.stderr
    listed = pip(python, "list", "--format", "freeze").stdout.splitlines()
    assert {"horovod==0.28.1", "petastorm==0.12.1", "sparkdl==3.0.0"} <= set(listed)
    assert pip(python, "check").returncode == 0
    program = """
import importlib.metadata as metadata, importlib.util, sys
assert metadata.version("horovod") == "0.28.1"
assert metadata.packages_distributions()["horovod"] == ["horovod"]
assert importlib.util.find_spec("horovod") is not None and "farandole" not in sys.modules
import horovod.common.util, petastorm.errors
assert horovod.__version__ == "0.28.1" and horovod.common.util.gloo_built()
print(sys.modules["horovod"].__doc__)
"""
    done = run(python, "-I", "-c", program)  # -I: no PYTHONPATH
    assert (done.stdout, done.stderr) == ("Answered by farandole.\n", "")
    done = run(*command, "status")
    assert done.stdout.splitlines()[0] == "horovod 0.28.1: farandole's"
    assert run(*command, "install").returncode == 0  # once more
    done = pip(python, "uninstall", "-y", "horovod")
    assert done.returncode == 0, done.stderr
    assert "No module named 'horovod'" in run(python, "-c", "import horovod").stderr
    done = run(*command, "remove")
    assert done.stdout.splitlines()[:2] == [f"horovod: none of farandole's in {site}", f"sparkdl: removed from {site}"]
    assert contents(site) == before


def test_a_folder_of_pythonpath(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    install(tmp_path / "new" / "folder", ["horovod"])
    source = Path(farandole.__file__).parents[1]
    path = os.pathsep.join([str(tmp_path / "new" / "folder"), str(source)])
    done = run(
        sys.executable,
        "-c",
        "import horovod.torch as hvd; hvd.init(); print(hvd.__name__, hvd.size())",
        PYTHONPATH=path,
    )
    assert done.stdout == "horovod.torch 1\n", done.stderr
    assert status(tmp_path / "new" / "folder", ["horovod", "sparkdl"]) == [
        "horovod 0.28.1: farandole's",
        "sparkdl: not installed",
    ]
    assert remove(tmp_path / "new" / "folder", ["horovod"]) == [f"horovod: removed from {tmp_path}/new/folder"]
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_another_package_of_the_name_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = tmp_path / "petastorm-0.12.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: petastorm\nVersion: 0.12.0\n")
    with pytest.raises(ConfigError, match=r"petastorm 0\.12\.0 is installed .* as-horovod install horovod sparkdl"):
        install(tmp_path)
    assert status(tmp_path) == ["horovod: not installed", "sparkdl: not installed", "petastorm 0.12.0: another package"]
    assert remove(tmp_path, ["petastorm"]) == [f"petastorm: none of farandole's in {tmp_path}"]
    assert [path.name for path in tmp_path.iterdir()] == [facts.name]
    # A package without an installer's record, as of a checkout.
    (tmp_path / "sparkdl").mkdir()
    (tmp_path / "sparkdl" / "__init__.py").write_text("")
    assert run_as_horovod(["install", "sparkdl", "--target", str(tmp_path)]) == 2
    assert f"sparkdl is installed in {tmp_path}/sparkdl: uninstall it" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    assert run_as_horovod(["install", "--target", str(tmp_path / "new")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"farandole as-horovod: {tmp_path} is not writable") and "--target DIR" in said
    assert list(tmp_path.iterdir()) == []


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_as_horovod(["install", "horovood"])
    assert "unknown package horovood; choose from horovod, sparkdl, petastorm" in capsys.readouterr().err
    assert run_as_horovod(["status", *PACKAGES]) == 0
