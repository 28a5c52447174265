"""The interpreter that tools/setup.sh takes, and the build of PyTorch that it asks pip for."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALLED = 'import sys\nif "importlib.metadata" in sys.argv[-1]: print("{version}")'
PIP = '#!/bin/sh\necho "$@" >>pip.log\n'
NO_TORCH = PIP + 'case "$*" in *--dry-run*torch*) exit 1 ;; esac\n'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Make a project with a virtual environment whose pip only notes its arguments."""
    for name in ("pyproject.toml", "constraints.txt", "CMakeLists.txt", "tools/setup.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "native").mkdir()
    (tmp_path / "tools" / "check_java.sh").symlink_to(shutil.which("true") or "/bin/true")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    write_command(tmp_path / ".venv" / "bin" / "pip", PIP)
    have(tmp_path, "")
    return tmp_path


def write_command(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def have(project: Path, version: str) -> None:
    """Let `version` of torch be installed."""
    write_command(project / ".venv" / "bin" / "python", f"#!{sys.executable}\n{INSTALLED.format(version=version)}\n")


def set_up(project: Path, torch: str | None = None) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "TORCH"}
    environment |= {} if torch is None else {"TORCH": torch}
    command = ["bash", "tools/setup.sh"]
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=60)


def asked(project: Path, torch: str | None = None) -> list[str]:
    """Set up, and return what pip was asked to do with torch."""
    (project / "pip.log").unlink(missing_ok=True)
    done = set_up(project, torch)
    assert done.returncode == 0, done.stderr
    lines = (project / "pip.log").read_text().splitlines() if (project / "pip.log").exists() else []
    return [line for line in lines if "torch" in line and "--dry-run" not in line]


VERSION = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
CPU = f"install -c constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu torch=={VERSION}"
CUDA = f"install -c constraints.txt torch==={VERSION}"


def test_a_word_chooses_the_build_of_pytorch(project: Path) -> None:
    assert asked(project) == [CPU]
    have(project, f"{VERSION}+cpu")
    assert asked(project, "cuda") == ["uninstall -y torch", CUDA]
    have(project, VERSION)
    assert asked(project) == []  # the environment remembers the word
    assert asked(project, "cpu") == ["uninstall -y torch", CPU]


def test_no_pytorch_is_asked_for(project: Path) -> None:
    assert asked(project, "none") == []
    assert "-e .[dev,spark,tensorboard]" in (project / "pip.log").read_text()


def test_no_index_has_pytorch_for_this_python(project: Path) -> None:
    write_command(project / ".venv" / "bin" / "pip", NO_TORCH)
    assert asked(project) == []  # it ends well, and says so
    done = set_up(project, "cpu")
    assert done.returncode == 1
    assert "no index offers torch" in done.stderr


def test_the_path_of_python_may_have_blanks(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = project / "Program Files" / "python3"
    python.parent.mkdir()
    write_command(python, "#!/bin/sh\n")
    monkeypatch.setenv("PYTHON", str(python))
    done = set_up(project)
    assert done.returncode == 0, done.stderr


def test_another_word_is_refused(project: Path) -> None:
    done = set_up(project, "https://example.com/simple")
    assert done.returncode == 1
    assert "TORCH=https://example.com/simple is unknown: TORCH may be cpu" in done.stderr


def test_the_readme_has_no_address_of_a_package_host() -> None:
    assert re.findall(r"https?://\S*(?:pypi\.org|pytorch\.org)\S*", (ROOT / "README.md").read_text()) == []
