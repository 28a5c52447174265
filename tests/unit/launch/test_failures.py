"""Which of several failures is the first cause."""

import importlib
import re
import signal
import sys
import threading
from pathlib import Path

import pytest

from farandole.errors import CollectiveTimeout, PeerLost, RankFailed
from farandole.launch.channel import WorkerFailure
from farandole.launch.failures import (
    Exit,
    Failure,
    culprit,
    exit_failure,
    from_payload,
    is_consequence,
    to_payload,
)
from farandole.launch.pickling import dump_call
from farandole.launch.worker import run_call


def failure(rank: int, at: float, *, killed: bool = False, consequence: bool = False) -> Failure:
    return Failure(rank=rank, reason="", code=1, at=at, killed=killed, consequence=consequence)


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([failure(2, 1.0)], 2),
        ([failure(2, 1.0), failure(1, 0.5)], 1),
        ([failure(0, 1.0, consequence=True), failure(1, 1.1)], 1),
        ([failure(0, 1.0), failure(1, 1.1, killed=True)], 1),
        ([failure(0, 1.0, consequence=True), failure(1, 1.1, consequence=True)], 0),
        ([failure(3, 1.0), failure(1, 1.0)], 1),
    ],
)
def test_culprit(failures: list[Failure], rank: int) -> None:
    assert culprit(failures).rank == rank
    assert culprit(failures[::-1]).rank == rank


def ended(code: int) -> Exit:
    return Exit(rank=1, code=code, at=2.0, reason="why")


@pytest.mark.parametrize(
    ("code", "shell_code", "killed"),
    [
        (3, 3, False),
        (-signal.SIGKILL, 137, True),
        (-signal.SIGSEGV, 139, True),
        # Native code that lost its peer ends like this.
        (-signal.SIGABRT, 134, False),
        (-signal.SIGPIPE, 141, False),
    ],
)
def test_exit_becomes_failure(code: int, shell_code: int, killed: bool) -> None:
    got = exit_failure(ended(code), ["last"])
    assert (got.rank, got.code, got.killed, got.at, got.tail) == (1, shell_code, killed, 2.0, ("last",))


def test_a_script_that_lost_its_peer_is_a_consequence() -> None:
    trace = ["Traceback (most recent call last):", "farandole.errors.PeerLost: 'w': rank 1 is lost (crashed)", "[W] x"]
    assert exit_failure(ended(1), trace).consequence
    assert not exit_failure(ended(1), ["ValueError: farandole.errors.PeerLost: quoted"]).consequence


def test_consequences() -> None:
    assert is_consequence(PeerLost("w", 1, "was killed or crashed"))
    assert is_consequence(CollectiveTimeout("w", (1,), 3.0))
    assert not is_consequence(ValueError("own"))


def test_error_carries_the_cause() -> None:
    cause = KeyError("x")
    error = Failure(rank=1, reason="KeyError: 'x'", code=1, traceback="trace", tail=("line",), cause=cause).error()
    assert isinstance(error, RankFailed)
    assert error.__cause__ is cause
    assert error.args == (1, "KeyError: 'x'", "trace", ("line",), ())


class WithAList(Exception):
    """An exception whose `__init__` does not take its `args`."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"{code} at {where}")
        self.code, self.where, self.lock = code, where, threading.Lock()


class Refusing(Exception):
    def __reduce__(self) -> str:
        raise TypeError("not for travel")

    def __new__(cls, text: str) -> "Refusing":
        return super().__new__(cls, text)


def sent(error: BaseException, times: int = 2) -> Failure:
    """Return the failure as the driver sees it, `times` processes away."""
    failure = Failure(rank=1, reason=str(error), code=1, cause=error)
    for _ in range(times):
        failure = from_payload(1, to_payload(failure), 0.0)
    return failure


def test_a_cause_that_cannot_be_unpickled_comes_in_parts() -> None:
    cause = sent(WithAList(3, where="store")).error().__cause__
    assert isinstance(cause, WithAList)
    assert (cause.args, cause.code, cause.where) == (("3 at store",), 3, "store")
    (note,) = cause.__notes__
    assert "it cannot be pickled as a whole (TypeError: cannot pickle '_thread.lock' object)" in note
    assert "Left out, as they cannot be pickled: lock." in note


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (Refusing("no"), r"Refusing cannot be pickled \(TypeError: not for travel\)"),
        (ValueError("x" * (2 << 20)), "ValueError is larger than 1 MiB"),
    ],
)
def test_an_error_without_its_cause_says_why(error: BaseException, why: str) -> None:
    failed = sent(error).error()
    assert failed.__cause__ is None
    assert re.search(f"exception of rank 1 is not the cause of this error: {why}", failed.__notes__[0])


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("def main():\n    assert 1 > 2\n", r"AssertionError in .*program.py, line 2: assert 1 > 2"),
        ("def main():\n    raise ValueError\n", r"ValueError in .*program.py, line 2: raise ValueError"),
        ("def main():\n    raise ValueError('no')\n", r"ValueError: no"),
    ],
)
def test_an_exception_without_a_text_shows_its_line(
    program: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text(program)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "program", raising=False)
    outcome = run_call(dump_call(importlib.import_module("program").main, (), {}))
    assert isinstance(outcome, WorkerFailure) and re.fullmatch(reason, outcome.reason)
    del sys.modules["program"]
