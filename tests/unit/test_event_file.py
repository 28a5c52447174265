"""Event files are read back with TensorBoard's own reader."""

import pickle
from pathlib import Path

import pytest

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from farandole.integrations.tensorboard import EventFile, TensorBoardLogger


@pytest.mark.usefixtures("frameworks")  # TensorBoard imports TensorFlow where it is installed
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    with EventFile(tmp_path / "logs") as first:
        first.scalars({"loss": 0.5, "rows/s": 100.0}, step=1)
    with EventFile(tmp_path / "logs") as resumed:
        resumed.scalars({"loss": 0.25}, step=2)
        resumed.flush()
        seen = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert [(point.step, point.value) for point in seen.Scalars("loss")] == [(1, 0.5), (2, 0.25)]
    assert [point.value for point in seen.Scalars("rows/s")] == [100.0]
    assert first.path != resumed.path


def test_large_steps_and_long_names(tmp_path: Path) -> None:
    with EventFile(tmp_path) as events:
        events.scalars({"x" * 300: -1.5}, step=2**40)
    seen = EventAccumulator(str(tmp_path)).Reload()
    assert [(point.step, point.value) for point in seen.Scalars("x" * 300)] == [(2**40, -1.5)]
    with pytest.raises(ValueError, match="must be >= 0"), EventFile(tmp_path) as events:
        events.scalars({"loss": 1.0}, step=-1)


def test_nothing_is_added_after_close(tmp_path: Path) -> None:
    with EventFile(tmp_path) as events:
        pass
    with pytest.raises(ValueError, match="closed"):
        events.scalars({"loss": 1.0}, step=1)


@pytest.mark.usefixtures("frameworks")
def test_a_logger_writes_the_epochs_of_a_fit(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path / "curves")
    for epoch in (1, 2):
        record = {"epoch": epoch, "steps": 4, "loss": 1 / epoch, "val_loss": 2 / epoch, "seconds": 1.0}
        logger.log_epoch({**record, "rows_per_s": 9e3, "waited": 0.125})
    assert isinstance(pickle.loads(pickle.dumps(logger)), TensorBoardLogger)  # an estimator is saved with its loggers
    logger.close()
    (file,) = (tmp_path / "curves").iterdir()
    seen = EventAccumulator(str(file)).Reload()
    curves = {"train/rows_per_s", "train/waiting_for_data_percent", "train/loss", "validation/loss"}
    assert set(seen.Tags()["scalars"]) == curves
    assert [(point.step, point.value) for point in seen.Scalars("validation/loss")] == [(1, 2.0), (2, 1.0)]
