"""Every code block of README and guides runs."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.code_blocks import CodeBlock, read_code_blocks
from helpers.programs import run, warm_spark
from helpers.warm import FRAMEWORKS

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
BLOCKS = [block for page in PAGES for block in read_code_blocks(page, str(page.relative_to(ROOT)))]

pytestmark = pytest.mark.native


def is_there(name: str) -> bool:
    return shutil.which("java") is not None if name == "java" else importlib.util.find_spec(name) is not None


def framework_of(block: CodeBlock) -> str | None:
    """Return the framework that the block's processes import first; None where they begin with none."""
    return next((each for each in FRAMEWORKS if each in block.needs and block.language != "sh"), None)


@pytest.mark.parametrize("block", [pytest.param(block, id=str(block)) for block in BLOCKS])
def test_code_block(block: CodeBlock, tmp_path: Path) -> None:
    missing = [name for name in block.needs if not is_there(name)]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")
    if block.language == "sh":
        command = ["bash", "-euo", "pipefail", "-c", block.program]
    else:
        program = tmp_path / "program.py"
        program.write_text(block.program, encoding="utf-8")
        command = [sys.executable, str(program)]
        if block.ranks > 1:
            command = ["farandole", "run", "-np", str(block.ranks), *command]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # the commands of this environment
    environment = {**os.environ, "PATH": path}
    framework = framework_of(block)
    if framework is None:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=150,
        )
    else:
        if "java" in block.needs:
            environment |= warm_spark(framework)
        done = run(command, framework=framework, cwd=tmp_path, env=environment, timeout=150, merged=True)
    assert done.returncode == 0, f"{block} failed:\n{done.stdout[-6000:]}"
