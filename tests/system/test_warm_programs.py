"""Programs of tests that are forked from a process with a framework behave as those of a new interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.installed import require
from helpers.programs import run

FACTS = """
import json, os, signal, sys, threading

print(json.dumps({
    "arguments": sys.argv,
    "name": __name__,
    "folder": os.getcwd(),
    "path": sys.path[0],
    "variable": os.environ.get("FACT"),
    "open": len(os.listdir("/proc/self/fd")),
    "signals": {each.name: str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM)},
    "leads": os.getsid(0) == os.getpid() == os.getpgid(0),
    "threads": threading.active_count(),
    "input": sys.stdin.read(),
    "line": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
    "shown": [each for each in open("/proc/self/environ").read().split("\\0") if each.startswith("FACT")],
    "own": "helpers" in sys.modules,
}))
print("to stderr", file=sys.stderr)
"""
CHILD = """
import subprocess, sys
done = subprocess.run([sys.executable, "-c", "import sys; print(sys.argv, 'torch' in sys.modules); sys.exit(5)", "x"],
                      stdout=subprocess.PIPE, text=True, env={"NONE": ""})
print(done.stdout.replace("True", "").replace("False", ""), done.returncode)
"""
ENDS = {
    "facts": FACTS,
    "child": CHILD,
    "code": "import sys; sys.exit(7)",
    "text": "import sys; sys.exit('no good')",
    "exception": "raise KeyError('lost')",
    "interrupt": "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(9)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "atexit": "import atexit; atexit.register(print, 'ended'); print('ends')",
    "thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
    "exit": "import os; print('lost'); os._exit(3)",
}


def last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


@pytest.mark.parametrize(
    ("name", "way"), [*((name, way) for name in ENDS for way in ("file", "text")), ("facts", "safe path")]
)
def test_a_program_is_as_after_an_exec(name: str, way: str, tmp_path: Path) -> None:
    require("torch")
    file = tmp_path / "program.py"
    file.write_text(ENDS[name])
    program = {"file": [str(file)], "text": ["-c", ENDS[name]], "safe path": ["-P", str(file)]}[way]
    command = [sys.executable, *program, "one", "two words"]
    environment = {**os.environ, "FACT": "ä"}
    new = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL,
        start_new_session=True, timeout=60,
    )  # fmt: skip
    forked = run(command, cwd=tmp_path, env=environment)
    assert (forked.returncode, forked.stdout) == (new.returncode, new.stdout)
    assert last_line(forked.stderr) == last_line(new.stderr)


def test_a_program_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    require("torch")
    file = tmp_path / "id"
    program = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    with pytest.raises(subprocess.TimeoutExpired):
        run([sys.executable, "-c", program], timeout=3.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


def test_ranks_of_a_program_are_forked_too() -> None:
    """Otherwise each rank imports its framework again, and the suite takes half as long again."""
    require("torch")
    program = "import sys, farandole; print(farandole.run(lambda: 'torch' in __import__('sys').modules, num_proc=1))"
    assert run([sys.executable, "-c", program]).stdout.endswith("[True]\n")
