"""The values of a fit's epochs: curves, pictures, and what loggers get."""

import logging
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from farandole.errors import ConfigError, MissingExtra
from farandole.estimators.history import EpochLog, History, epoch_points
from farandole.estimators.params import EstimatorParams

RECORDS = [
    {
        "epoch": float(epoch),
        "steps": 4.0,
        "loss": 1 / epoch,
        "val_loss": 2 / epoch,
        "acc": 0.5,
        "seconds": 1.0,
        "rows_per_s": 9e3,
        "waited": 0.125,
    }
    for epoch in (1, 2, 3)
]
POINTS = {"train/rows_per_s": 9e3, "train/waiting_for_data_percent": 12.5, "train/loss": 0.5, "validation/loss": 1.0}


def test_points_of_an_epoch() -> None:
    assert epoch_points(RECORDS[1]) == {**POINTS, "train/acc": 0.5}


def test_a_panel_holds_training_and_validation() -> None:
    pytest.importorskip("matplotlib")
    loss, accuracy = History(RECORDS).plot().axes
    assert (loss.get_title(), accuracy.get_title()) == ("loss", "acc")
    curves = {line.get_label(): line.get_xydata().tolist() for line in loss.get_lines()}
    assert curves == {
        "train": [[1.0, 1.0], [2.0, 0.5], [3.0, 1 / 3]],
        "validation": [[1.0, 2.0], [2.0, 1.0], [3.0, 2 / 3]],
    }


def test_a_notebook_shows_curves_and_numbers() -> None:
    pytest.importorskip("matplotlib")
    shown = History([*RECORDS, {"epoch": 4.0, "steps": 4.0, "loss": 0.25, "<b>": 1.0}])._repr_html_()
    assert shown.startswith("<svg")
    assert "<th>val_loss</th>" in shown
    assert "<th>&lt;b&gt;</th>" in shown
    assert "<td>0.333333</td>" in shown
    assert shown.count("<tr>") == 1 + 4
    assert History()._repr_html_() == "<table><thead><tr></tr></thead><tbody></tbody></table>"


def test_without_matplotlib_a_notebook_shows_numbers_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "matplotlib":
                raise ModuleNotFoundError("No module named 'matplotlib'", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    shown = History(RECORDS)._repr_html_()
    assert "farandole[plots]" in shown
    assert shown.count("<tr>") == 1 + 3
    with pytest.raises(MissingExtra, match="plots"):
        History(RECORDS).plot()


class Kept:
    """A logger that keeps what it gets, and fails at one epoch."""

    def __init__(self, fails_at: float = 0.0) -> None:
        self.epochs: list[float] = []
        self._fails_at = fails_at

    def log_epoch(self, record: Mapping[str, float]) -> None:
        if record["epoch"] == self._fails_at:
            raise ConnectionError("the server is gone")
        self.epochs.append(record["epoch"])


def test_each_logger_gets_each_epoch_once_though_another_fails(caplog: pytest.LogCaptureFixture) -> None:
    failing, other = Kept(fails_at=2.0), Kept()
    with EpochLog([failing, other]) as epochs:
        for place in (0, 1, 1, 0, 2):  # an attempt that is repeated sends its epochs again
            epochs.add(RECORDS[place])
    assert failing.epochs == [1.0, 3.0]
    assert other.epochs == [1.0, 2.0, 3.0]
    (said,) = (each for each in caplog.records if each.levelno >= logging.ERROR)
    assert said.getMessage() == "Kept has failed with the values of epoch 2"


def test_what_is_no_logger_is_refused() -> None:
    kept = Kept()
    checked = EstimatorParams.loggers.checked
    assert checked(kept) == checked([kept]) == [kept]
    for wrong in (Kept, "mlflow", [kept, print]):
        with pytest.raises(ConfigError, match=r"^loggers: must be objects with a method log_epoch"):
            checked(wrong)


def test_mlflow_has_what_its_logger_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("GIT_PYTHON_REFRESH", "quiet")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    from farandole.integrations.mlflow import MLflowLogger

    with mlflow.start_run() as run, EpochLog([MLflowLogger()]) as epochs:  # which has another thread
        for record in RECORDS:
            epochs.add(record)
    client = mlflow.MlflowClient()
    losses = client.get_metric_history(run.info.run_id, "validation/loss")
    assert [(each.step, each.value) for each in losses] == [(1, 2.0), (2, 1.0), (3, 2 / 3)]
    assert set(client.get_run(run.info.run_id).data.metrics) == {*POINTS, "train/acc"}
    assert MLflowLogger(run_id=run.info.run_id).run_id == run.info.run_id
