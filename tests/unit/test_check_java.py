"""Who has no usable Java is told so in one sentence, before anything else happens."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECK = ROOT / "tools" / "check_java.sh"


def fake_java(folder: Path, says: str, code: int = 0) -> Path:
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\ncat >&2 <<'EOF'\n{says}\nEOF\nexit {code}\n")
    java.chmod(0o755)
    return java


def check(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    # bash, sed and head are found where they always are; java only where the test puts it.
    env = {"PATH": os.environ["PATH"], **env}
    return subprocess.run(["/bin/bash", CHECK], env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "says",
    [
        'openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime Environment (build 17.0.15+6)',
        'openjdk version "21" 2023-09-19',
        'Picked up JAVA_TOOL_OPTIONS: -Xmx1g\njava version "25-ea" 2025-09-16',
    ],
)
def test_a_java_that_will_do(tmp_path: Path, says: str) -> None:
    fake_java(tmp_path, says)
    done = check({"JAVA_HOME": str(tmp_path)})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("says", "code", "text"),
    [
        ('java version "1.8.0_401"', 0, "is Java 8. Spark needs Java 17 or newer: install it"),
        ('openjdk version "11.0.2" 2019-01-15', 0, "is Java 11. Spark needs"),
        ("Error: could not find libjava.so", 2, "does not run. Spark needs"),
        ("hello", 0, "does not say its version. Spark needs"),
    ],
)
def test_a_java_that_will_not_do(tmp_path: Path, says: str, code: int, text: str) -> None:
    java = fake_java(tmp_path, says, code)
    done = check({"JAVA_HOME": str(tmp_path)})
    assert done.returncode == 1
    assert f"{java} {text}" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_java_home_without_java(tmp_path: Path) -> None:
    done = check({"JAVA_HOME": str(tmp_path)})
    assert done.returncode == 1
    assert f"JAVA_HOME is {tmp_path}, but there is no bin/java in it. Spark needs" in done.stderr


def test_no_java_at_all(tmp_path: Path) -> None:
    for tool in ("sed", "head", "bash"):
        (tmp_path / tool).symlink_to(f"/bin/{tool}")
    done = check({"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert "There is no java on PATH, and JAVA_HOME is not set. Spark needs Java 17" in done.stderr


def test_the_one_on_the_path_is_used_when_java_home_is_not_set(tmp_path: Path) -> None:
    fake_java(tmp_path, 'openjdk version "11.0.2"')
    done = check({"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"})
    assert f"{tmp_path / 'bin' / 'java'} is Java 11" in done.stderr


def test_the_demo_refuses_before_anything_else(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "JAVA_HOME": str(tmp_path)}
    done = subprocess.run(["make", "demo"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "no bin/java in it" in done.stderr
    assert done.stdout == ""
