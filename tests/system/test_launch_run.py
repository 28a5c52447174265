"""`farandole.run`: functions on ranks."""

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

import farandole
from farandole.config import Config
from farandole.errors import ConfigError, PicklingError, RankFailed, SlotsError
from farandole.launch import calls
from system.launched import PATIENCE, REAPED, Watch, wait_for_files


def by_value(function: Callable[..., object]) -> Callable[..., object]:
    """Make `function` one of `__main__`, as a script's or a notebook's is: workers cannot import this module."""
    function.__module__ = "__main__"
    return function


@by_value
def place(*numbers: int, scale: int = 1) -> tuple[int, int, int]:
    rank, size = int(os.environ["FARANDOLE_RANK"]), int(os.environ["HOROVOD_SIZE"])
    return rank, size, sum(numbers) * scale


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_results_by_rank(size: int) -> None:
    assert farandole.run(place, (1, 2), {"scale": 10}, size) == [(rank, size, 30) for rank in range(size)]


@by_value
def outcome(how: str) -> object:
    if os.environ["FARANDOLE_RANK"] == "0":
        time.sleep(1000)
    if how == "raise":
        raise KeyError("lost")
    if how == "exit 4":
        sys.exit(4)
    if how == "exit text":
        sys.exit("no data")
    if how == "_exit 0":
        os._exit(0)
    if how == "_exit 5":
        os._exit(5)
    if how.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[how])
    if how == "lock":
        return {"a": [threading.Lock()]}
    return None


@pytest.mark.parametrize(
    ("how", "reason", "cause"),
    [
        ("raise", "KeyError: 'lost'", KeyError),
        ("exit 4", "called sys.exit(4)", SystemExit),
        ("exit text", "called sys.exit('no data')", SystemExit),
        ("_exit 0", "exited with code 0 before its function returned", None),
        ("_exit 5", "exited with code 5", None),
        ("SIGKILL", "was killed by SIGKILL", None),
        ("SIGSEGV", "was killed by SIGSEGV (a crash in native code)", None),
        ("lock", "returned a value that cannot be pickled: value['a'][0] (TypeError", TypeError),
    ],
)
def test_failure(how: str, reason: str, cause: type[BaseException] | None) -> None:
    with pytest.raises(RankFailed) as caught:
        farandole.run(outcome, (how,), num_proc=2)
    assert caught.value.rank == 1
    assert caught.value.reason.startswith(reason)
    assert type(caught.value.__cause__) is (cause or type(None))
    if how == "raise":
        assert "in outcome" in caught.value.traceback and "worker.py" not in caught.value.traceback
    if how == "SIGSEGV":
        assert any("Segmentation fault" in line for line in caught.value.tail)


@by_value
def leave(code: object) -> NoReturn:
    sys.exit(code)  # type: ignore[arg-type]


@pytest.mark.parametrize("code", [0, None, False])
def test_leaving_well_is_none(code: object) -> None:
    assert farandole.run(leave, (code,), num_proc=2) == [None, None]


@by_value
def return_without_output() -> str:
    if os.environ["FARANDOLE_RANK"] == "0":
        sys.stdout.close()
    else:
        sys.stdout = None
    return "value"


def test_a_value_needs_no_output() -> None:
    assert farandole.run(return_without_output, num_proc=2) == ["value", "value"]


def test_an_exception_that_does_not_unpickle_comes_in_parts() -> None:
    @by_value
    def main() -> None:
        class Odd(Exception):
            def __init__(self, a: int, b: int) -> None:
                super().__init__("odd")

        raise Odd(1, 2)

    with pytest.raises(RankFailed, match="odd") as caught:
        farandole.run(main)
    cause = caught.value.__cause__
    assert (type(cause).__name__, cause.args) == ("Odd", ("odd",))
    assert "Made of its args and attributes" in cause.__notes__[0]
    assert "Odd" in caught.value.traceback


def test_what_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()

    @by_value
    def train() -> object:
        return lock

    with pytest.raises(PicklingError) as caught:
        farandole.run(train, num_proc=2)
    assert caught.value.path == "train's closure variable 'lock'"
    with pytest.raises(PicklingError, match=r"kwargs\['lock'\] cannot be pickled"):
        farandole.run(place, kwargs={"lock": lock})


def test_numpy_functions_and_values() -> None:
    (value,) = farandole.run(functools.partial(np.multiply, np.arange(3)), (np.int64(2),))
    np.testing.assert_array_equal(value, [0, 2, 4])


def test_a_module_that_workers_do_not_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def main():\n    return 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    import mine  # type: ignore[import-not-found]

    assert farandole.run(mine.main) == [5]  # sys.path goes along
    monkeypatch.undo()
    with pytest.raises(RankFailed, match="No module named 'mine'") as caught:
        farandole.run(mine.main)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    del sys.modules["mine"]


def test_environment_settings_and_output(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    @by_value
    def main() -> tuple[str, ...]:
        print("out", flush=True)
        print("err", file=sys.stderr)
        names = ("MINE", "FARANDOLE_START_TIMEOUT", "FARANDOLE_CACHE_CAPACITY", "FARANDOLE_WORKER_FD")
        return tuple(os.environ.get(name, "") for name in names)

    config = Config(cache_capacity=5)
    got = farandole.run(main, env={"MINE": "x"}, start_timeout=60, config=config, output_filename=tmp_path)
    assert got == [("x", "60000000us", "5", "")]
    assert capsys.readouterr() == ("[0] out\n", "[0] err\n")
    assert (tmp_path / "rank.0" / "stdout").read_text() == "out\n"


def test_lines_can_be_taken() -> None:
    lines: list[tuple[int, str, str]] = []
    farandole.run(by_value(functools.partial(print, "hi")), num_proc=2, on_line=lambda *line: lines.append(line))
    assert sorted(lines) == [(0, "stdout", "hi"), (1, "stdout", "hi")]


def test_a_large_call_and_a_large_value() -> None:
    data = bytes(range(256)) * 40_000  # 10 MB: more than any pipe holds
    assert farandole.run(by_value(lambda x: x[::-1]), (data,), num_proc=2) == [data[::-1]] * 2


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"num_proc": 0}, ConfigError),
        ({"num_proc": 3, "hosts": "localhost:2"}, SlotsError),
        ({"start_timeout": 0}, ConfigError),
    ],
)
def test_what_cannot_be_started(arguments: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        farandole.run(place, **arguments)  # type: ignore[arg-type]


def test_a_worker_that_does_not_start(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 1000\n")
    python.chmod(0o755)
    started = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 0 failed: did not start within 0\.3 s"):
        farandole.run(place, executable=str(python), start_timeout=timedelta(seconds=0.3))
    assert time.monotonic() - started < 60


def test_a_worker_that_does_not_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(calls, "EXIT_TIMEOUT", timedelta(seconds=0.3))

    @by_value
    def main() -> int:
        threading.Thread(target=time.sleep, args=(1000,)).start()
        return 3

    assert farandole.run(main) == [3]
    assert "rank 0 returned its value but did not end within 0.3 s" in caplog.text


def test_a_crash_at_the_end_is_no_success() -> None:
    @by_value
    def main() -> None:
        import atexit

        atexit.register(os.kill, os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailed, match="returned its value, but was killed by SIGKILL"):
        farandole.run(main)


def test_ctrl_c(tmp_path: Path) -> None:
    program = f"""
import farandole, os, time
def main():
    with open(f"{tmp_path}/rank.{{os.environ['FARANDOLE_RANK']}}", "w") as file:
        print(os.getpid(), file=file)
    time.sleep(1000)
try:
    farandole.run(main, num_proc=2)
except KeyboardInterrupt:
    print("interrupted")
"""
    with (
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process,
        Watch(wait_for_files(tmp_path, ["rank.0", "rank.1"])) as watch,
    ):
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
        assert watch.survivors(timeout=REAPED) == []
    assert (out, err, process.returncode) == ("interrupted\n", "", 0)


@by_value
def train(how: str) -> None:
    import farandole.numpy as hvd

    hvd.init()
    total = hvd.allreduce(np.ones(4), op=hvd.Sum, name="start")
    assert total[0] == hvd.size()
    for step in range(1_000_000):
        if hvd.rank() == hvd.size() - 1 and step == 20:
            outcome(how)
        hvd.allreduce(np.ones(4), name="grad")


@pytest.mark.native
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "KeyError: 'lost'"),
        ("_exit 5", "exited with code 5"),
        ("SIGKILL", "was killed by SIGKILL"),
        ("SIGSEGV", "was killed by SIGSEGV"),
    ],
)
def test_the_guilty_rank_is_named_in_the_middle_of_training(how: str, reason: str, size: int) -> None:
    with pytest.raises(RankFailed) as caught:
        farandole.run(train, (how,), num_proc=size)
    assert caught.value.rank == size - 1
    assert caught.value.reason.startswith(reason)
