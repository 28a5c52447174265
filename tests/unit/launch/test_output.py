"""Where lines go."""

import errno
import io
import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from farandole.compat.output import HorovodOutput
from farandole.errors import ConfigError
from farandole.launch.cli import launch, run_parser
from farandole.launch.output import Output


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_prefix_by_stream() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    with Output(2, stdout=stdout, stderr=stderr) as output:
        output(0, "stdout", "a")
        output(1, "stderr", "b")
        output(1, "stdout", "")
    assert stdout.getvalue() == "[0] a\n[1] \n"
    assert stderr.getvalue() == "[1] b\n"


def test_timestamp() -> None:
    stdout = io.StringIO()
    with Output(1, timestamp=True, stdout=stdout) as output:
        output(0, "stdout", "a")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} \[0\] a\n", stdout.getvalue())


def test_lines_as_horovod_prints_them() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    with HorovodOutput(2, stdout=stdout, stderr=stderr) as output:
        output(0, "stdout", "a")
        output(1, "stderr", "b")
    assert (stdout.getvalue(), stderr.getvalue()) == ("[0]<stdout>:a\n", "[1]<stderr>:b\n")
    with HorovodOutput(1, timestamp=True, stdout=stdout) as output:
        output(0, "stdout", "c")
    assert re.search(r"\n\w{3} \w{3} \d\d \d\d:\d\d:\d\d \d{4}\[0\]<stdout>:c\n$", stdout.getvalue())


@pytest.mark.parametrize(("size", "name"), [(2, "rank.1"), (10, "rank.1"), (11, "rank.01")])
def test_files(tmp_path: Path, size: int, name: str) -> None:
    stdout = io.StringIO()
    with Output(size, directory=tmp_path / "new" / "logs", stdout=stdout) as output:
        output(1, "stdout", "é")
        output(1, "stderr", "b")
    assert (tmp_path / "new" / "logs" / name / "stdout").read_text(encoding="utf-8") == "é\n"
    assert (tmp_path / "new" / "logs" / name / "stderr").read_text(encoding="utf-8") == "b\n"
    assert len(list((tmp_path / "new" / "logs").iterdir())) == size
    assert stdout.getvalue() == "[1] é\n"


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"output_filename: cannot write .*Not a directory"):
        Output(2, directory=tmp_path / "file")


def test_a_stream_that_cannot_show_a_character() -> None:
    raw = io.BytesIO()
    with Output(1, stdout=io.TextIOWrapper(raw, encoding="ascii", write_through=True)) as output:
        output(0, "stdout", "é")
        assert raw.getvalue() == b"[0] \\xe9\n"


def test_no_line_tears_another() -> None:
    stdout = io.StringIO()
    with Output(4, stdout=stdout) as output:
        threads = [
            threading.Thread(target=lambda rank=rank: [output(rank, "stdout", f"{rank}" * 50) for _ in range(200)])
            for rank in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    expected = [f"[{rank}] " + f"{rank}" * 50 for rank in range(4) for _ in range(200)]
    assert sorted(stdout.getvalue().splitlines()) == expected


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    """As the line comes, or if that went well as the file is closed; once."""
    file = tmp_path / "rank.0" / "stdout"
    file.parent.mkdir()
    file.symlink_to("/dev/full")
    told = f"No space left on device: '{file}'"
    with Output(1, directory=tmp_path, stdout=io.StringIO()) as output, pytest.raises(OSError, match=told):
        output(0, "stdout", "a")


class _Late(io.StringIO):
    name = "rank.0/stdout"

    def close(self) -> None:
        if not self.closed:  # the interpreter closes what goes, too
            super().close()
            raise OSError(errno.EDQUOT, "Disk quota exceeded")


class _LateOutput(Output):
    def __enter__(self) -> Self:
        self._files[0, "stdout"].close()
        self._files[0, "stdout"] = _Late()
        return self


TOLD = "output_filename: cannot write rank.0/stdout: Disk quota exceeded"


def test_a_file_that_is_not_whole_when_it_is_closed_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=TOLD), _LateOutput(1, directory=tmp_path, stdout=io.StringIO()) as output:
        output(0, "stdout", "a")


def test_a_file_that_is_not_whole_is_a_note_of_what_went_wrong_before(tmp_path: Path) -> None:
    with pytest.raises(LookupError) as raised, _LateOutput(1, directory=tmp_path):
        raise LookupError
    assert raised.value.__notes__ == [TOLD]


@pytest.mark.parametrize(
    ("program", "code", "said"), [("exit 3", 3, ["rank 0 failed: exited with code 3", TOLD]), (":", 2, [TOLD])]
)
def test_the_failure_of_a_rank_comes_before_a_file_that_is_not_whole(
    program: str,
    code: int,
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("signal.signal", lambda number, handler: handler)
    words = ["-np", "1", "--output-filename", str(tmp_path), "sh", "-c", program]
    assert launch(run_parser(), words, os.environ, _LateOutput) == code
    assert [record.message.splitlines()[0] for record in caplog.records if record.levelname == "ERROR"] == said
