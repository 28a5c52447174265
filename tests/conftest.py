"""What holds for every test."""

import gc
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import hypothesis
import pytest
import spark_archive

from farandole import _native
from helpers.leaks import Snapshot
from helpers.programs import WarmFolder
from helpers.warm import SELDOM

PROGRAMS = Path(__file__).parent / "system" / "programs"
PACKAGES = Path(__file__).parent.parent / "tools" / "packages.sh"
CHECK_JAVA = Path(__file__).parent.parent / "tools" / "check_java.sh"

# A session takes ten seconds on a quiet machine, and each job a few more.
SPARK_SECONDS = 240

# XLA compiles each small model anew; its optimizations take longer than all that they could save here.
QUICK_XLA = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

# How long an example takes says more about the machine than about the code; pytest's timeout ends what hangs.
hypothesis.settings.register_profile("steady", deadline=None, print_blob=True)
hypothesis.settings.load_profile("steady")


# Signals that the interpreter itself ignores.
IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}


def pytest_configure(config: pytest.Config) -> None:
    """Prepare this process and those that tests start."""
    gc.set_threshold(*SELDOM)
    _native.set_leak_warnings(True)
    if not hasattr(config, "workerinput"):  # this process starts the workers, or runs all tests itself
        config.add_cleanup(WarmFolder().close)
    os.environ.setdefault("SPARK_SUBMIT_OPTS", spark_archive.java_options())
    os.environ.setdefault("XLA_FLAGS", QUICK_XLA)
    _take_default_signals()


def _take_default_signals() -> None:
    """Make tests independent of the signals that their starter, such as nohup, ignores or blocks.

    Processes that tests start get every signal's default. An ignored hangup does not end the tests."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    for number in signal.valid_signals() - IGNORED_BY_PYTHON:
        if signal.getsignal(number) is not signal.SIG_IGN:
            continue
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        elif number == signal.SIGHUP:
            signal.signal(number, _stay)
        else:
            signal.signal(number, signal.SIG_DFL)


def _stay(number: int, frame: FrameType | None) -> None:
    """Do nothing; unlike an ignored signal, a handled one has its default again in a program that is executed."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark whole programs as slow, and give Spark the time it needs.

    Without a Java Spark's tests are skipped, with the sentence that says what to install."""
    for item in items:
        if item.path.is_relative_to(PROGRAMS):
            item.add_marker(pytest.mark.slow)  # before pytest chooses tests by their marks
    items[:] = _slow_files_first(items)
    spark = [item for item in items if item.get_closest_marker("spark") is not None]
    if not spark:
        return
    for item in spark:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SPARK_SECONDS))
    java = subprocess.run([CHECK_JAVA], capture_output=True, text=True, timeout=120, check=False)
    if java.returncode != 0:
        for item in spark:
            item.add_marker(pytest.mark.skip(reason=java.stderr.strip()))


def _slow_files_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """Order the tests so that no worker begins with a slow file when the others are about to end.

    Files that use Spark come first, one after another, as they share a session."""
    spark = {item.path for item in items if any(item.iter_markers("spark"))}
    slow = {item.path for item in items if any(item.iter_markers("slow"))}
    return sorted(items, key=lambda item: (item.path not in spark, item.path not in slow))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the command that installs what skipped tests need."""
    skipped = terminalreporter.stats.get("skipped", [])
    lacking = subprocess.run([PACKAGES], capture_output=True, text=True, timeout=120, check=False).stdout.split()
    if skipped and lacking:
        text = f"{len(skipped)} tests were skipped. Some need {', '.join(lacking)}: make packages installs them"
        terminalreporter.write_line(text)


def pytest_sessionfinish() -> None:
    """End the Spark session that tests share."""
    _end_spark()


def _end_spark() -> None:
    if "helpers.spark_session" in sys.modules:
        sys.modules["helpers.spark_session"].end_local_session()


def pytest_collection_finish() -> None:
    """Keep what the frameworks have made at import out of each collection: half a second, for hundreds of tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def leak_police(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread, a child, a connection or a changed environment behind."""
    with_spark = request.node.get_closest_marker("spark") is not None
    if not with_spark:
        _end_spark()  # it would open connections in this test
    before = Snapshot.take()
    yield
    _end_reading_processes()
    leaks = before.leaks(shared_session=with_spark)
    if leaks:
        pytest.fail("the test left behind:\n  " + "\n  ".join(leaks), pytrace=False)


def _end_reading_processes() -> None:
    """End the processes that wait for another loader; they may stay for a minute."""
    if "farandole.data.loading.process_pool" in sys.modules:
        pool = sys.modules["farandole.data.loading.process_pool"]
        for process in pool._idle_processes():
            process.kill()  # which takes less time than the end of its interpreter
        pool.end_idle()


@pytest.fixture(scope="session")
def frameworks() -> None:
    """Import the packages that set variables, if they are there: no test is to blame for that."""
    names = [name for name in ("tensorflow", "keras", "ray") if importlib.util.find_spec(name) is not None]
    if importlib.util.find_spec("torch") is not None and importlib.util.find_spec("lightning") is not None:
        names.append("lightning")
    if "tensorflow" not in names and "keras" in names:
        names.remove("keras")  # it imports TensorFlow
    for name in names:
        importlib.import_module(name)
