"""The setting `log_level` within a rank: what it shows on stderr, and what it leaves to the program."""

import subprocess
import sys

import pytest

PROGRAM = """
import logging
{setup}
import farandole.numpy as hvd
hvd.init()
logging.getLogger("farandole.core").info("a note")
logging.getLogger("farandole.core").warning("a warning")
"""


def output(setup: str, **variables: str) -> str:
    program = PROGRAM.format(setup=setup)
    done = subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stderr


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ({}, ["a warning"]),
        ({"FARANDOLE_LOG_LEVEL": "info"}, ["farandole: a note", "farandole: a warning"]),
        ({"HOROVOD_LOG_LEVEL": "DEBUG"}, ["farandole: a note", "farandole: a warning"]),
        ({"FARANDOLE_LOG_LEVEL": "error"}, []),
    ],
)
def test_a_rank_shows_messages_from_the_level_on(level: dict[str, str], shown: list[str]) -> None:
    assert [line for line in output("", **level).splitlines() if line.endswith(("note", "warning"))] == shown


def test_messages_go_where_the_program_sends_them() -> None:
    setup = "logging.basicConfig(format='mine: %(message)s')"
    assert "mine: a note\n" in output(setup, FARANDOLE_LOG_LEVEL="info")
    assert "farandole: a note" not in output(setup, FARANDOLE_LOG_LEVEL="info")
    assert "a note" not in output(setup)
