"""Picture of `farandole demo`."""

import io

from rich.console import Console

from farandole.launch.demo import Picture, curve

LINE = '{"step": 50, "loss": 0.5, "right": 0.75, "rate": 12345.0, "communication": 0.25}'


def test_a_curve_falls_with_its_values() -> None:
    assert curve([]) == ""
    assert curve([8.0, 4.0, 1.0, 0.0]) == "█▅▂▁"
    assert curve([0.0, 0.0]) == "▁▁"
    assert len(curve([1.0] * 1000, width=50)) == 50


def test_without_a_terminal_the_picture_is_lines() -> None:
    text = io.StringIO()
    with Picture(2, 100, Console(file=text, width=120)) as picture:
        picture(0, "stdout", LINE)
        picture(1, "stderr", "[a warning]")
    assert text.getvalue().splitlines() == [
        "step 50  loss 0.5000  right 75.0%  samples/s 12,345  communication 25%",
        "[1] [a warning]",
    ]


def test_a_terminal_shows_the_newest_numbers() -> None:
    text = io.StringIO()
    with Picture(2, 100, Console(file=text, width=120, force_terminal=True)) as picture:
        picture(0, "stdout", LINE)
    assert "2 ranks on this machine" in text.getvalue() and "12,345" in text.getvalue()
