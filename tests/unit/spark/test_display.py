"""What the driver shows of the ranks' progress."""

import io
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("pyspark")

from rich.console import Console

from farandole.spark.driver import progress
from farandole.spark.driver.display import Display
from farandole.spark.driver.progress import Progress


def message(step: int, **changes: object) -> dict[str, object]:
    told = {"epoch": 2, "epochs": 3, "step": step, "steps": 10, "loss": 0.25, "rows_per_s": 1234.5, "waited": 0.125}
    return {"kind": "progress"} | told | changes


def test_plain_lines_when_the_output_is_no_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=40)
    with Display("fit", console) as display:
        for step in range(1, 11):
            display.show(1, message(step))
        display.show(0, {"kind": "epoch", "epoch": 2, "steps": 10, "seconds": 1.0, "loss": 0.5, "rows_per_s": 9e3})
        display.show(0, {"kind": "something else"})
        display.show(0, message(10, waited=None))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "[1] epoch 2/3 step 1/10 loss 0.2500 1,234 rows/s, 12% waiting for data",
        "[1] epoch 2/3 step 10/10 loss 0.2500 1,234 rows/s, 12% waiting for data",
        "epoch 2: loss 0.5000, 9,000 rows/s over all ranks",
        "[0] epoch 2/3 step 10/10 loss 0.2500 1,234 rows/s",
    ]


def test_a_table_of_all_ranks_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    before = sys.stdout
    with Display("fit of run_1", console) as display, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda rank: display.show(rank, message(3, loss=rank / 2)), range(4)))
        sys.stdout.write("a rank's own line\n")
    assert sys.stdout is before
    shown = out.getvalue()
    assert "fit of run_1" in shown
    assert "a rank's own line" in shown
    for loss in ("0.0000", "0.5000", "1.0000", "1.5000"):
        assert loss in shown
    assert "━" in shown  # the bars


def test_one_picture_with_bars_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = pytest.importorskip("IPython.display")
    pictures: dict[str, list[str]] = {}

    class Handle:
        def update(self, picture: Any) -> None:
            pictures["<0>"].append(picture.data)

    def display(picture: Any, *, display_id: bool) -> Handle:
        assert display_id
        pictures[f"<{len(pictures)}>"] = [picture.data]
        return Handle()

    monkeypatch.setattr(notebook, "display", display)
    with Display("fit <1>", Console(force_jupyter=True)) as display:
        for step in range(1, 11):
            display.show(0, message(step))
        display.show(1, message(10, epoch=3))
    (shown,) = pictures.values()
    assert 2 <= len(shown) < 11  # a few per second, and the last state
    assert '<progress value="11" max="30">' in shown[0]
    assert '<progress value="20" max="30">' in shown[-1]
    assert '<progress value="30" max="30">' in shown[-1]
    assert "<caption>fit &lt;1&gt;</caption>" in shown[-1]


def test_nothing_is_shown_before_a_rank_reports() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    with Display("fit", console):
        pass
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""


def test_a_message_without_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="without a number for loss"):
        Display("fit", Console(file=io.StringIO())).show(0, message(1, loss=None))


def test_a_rank_reports_now_and_then_and_at_the_end_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, object]] = []
    clock = itertools.count(0.0, 0.1)
    monkeypatch.setattr(progress, "send", lambda kind, payload: sent.append(payload))
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    ranks = Progress(epochs=2, steps=4)
    for step in range(8):
        ranks.step(rows=10, loss=float(step), waited=0.05)
    assert [(each["epoch"], each["step"], each["loss"]) for each in sent] == [
        (1, 3, 2.0),
        (1, 4, 3.0),
        (2, 3, 6.0),
        (2, 4, 7.0),
    ]
    assert sent[0]["rows_per_s"] == pytest.approx(100)
    assert sent[0]["waited"] == pytest.approx(0.5)


def test_outside_a_job_progress_goes_nowhere() -> None:
    Progress(epochs=1, steps=1).step(rows=1, loss=0.5)
    with pytest.raises(ValueError, match="steps"):
        Progress(epochs=1, steps=0)
