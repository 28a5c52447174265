"""Cutting output into lines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.launch.lines import LONGEST_LINE, LineSplitter


def split(*chunks: bytes) -> list[str]:
    splitter = LineSplitter()
    lines = [line for chunk in chunks for line in splitter.feed(chunk)]
    return lines + splitter.flush()


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"a\nb\n"], ["a", "b"]),
        ([b"a\nb"], ["a", "b"]),
        ([b"a", b"b", b"\n"], ["ab"]),
        ([b"\n\n"], ["", ""]),
        ([b"a\r\n\r\nb\r\n"], ["a", "", "b"]),
        ([b"a\r", b"\nb\n"], ["a", "b"]),
        ([b"\r 10%\r 20%", b"\r 30%\n"], [" 10%", " 20%", " 30%"]),
        ([b"done\r"], ["done"]),
        ([b"\xff\x00\n"], ["\ufffd\x00"]),
        (["né".encode()[:2], "né".encode()[2:], b"\n"], ["né"]),
        ([], []),
    ],
)
def test_lines(chunks: list[bytes], lines: list[str]) -> None:
    assert split(*chunks) == lines


def test_a_line_without_end_comes_in_pieces_of_bounded_size() -> None:
    splitter = LineSplitter()
    pieces = [line for _ in range(10) for line in splitter.feed(b"x" * LONGEST_LINE)] + splitter.flush()
    assert "".join(pieces) == "x" * LONGEST_LINE * 10
    assert max(map(len, pieces)) == LONGEST_LINE


@pytest.mark.parametrize("chunk", [1000, 5 * LONGEST_LINE])
@pytest.mark.parametrize("character", ["漢", "é", "🎉"])
def test_no_character_of_a_long_line_is_divided(character: str, chunk: int) -> None:
    text = "x" + character * LONGEST_LINE  # no multiple of the longest length
    data = f"{text}\n".encode()
    pieces = split(*(data[at : at + chunk] for at in range(0, len(data), chunk)))
    assert "".join(pieces) == text
    assert max(len(piece.encode()) for piece in pieces) <= LONGEST_LINE


def test_bytes_that_are_no_text_are_cut_at_the_longest_length() -> None:
    assert list(map(len, split(b"\x80" * 2 * LONGEST_LINE + b"\n"))) == [LONGEST_LINE, LONGEST_LINE]


@given(st.text(alphabet="ab \n", max_size=60), st.lists(st.integers(0, 60), max_size=5))
def test_where_chunks_end_changes_nothing(text: str, cuts: list[int]) -> None:
    data, bounds = text.encode(), sorted(cuts)
    chunks = [data[start:end] for start, end in zip([0, *bounds], [*bounds, len(data)], strict=True)]
    assert split(*chunks) == split(data)
    assert split(data) == text.removesuffix("\n").split("\n") if text else split(data) == []
