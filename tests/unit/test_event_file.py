"""Event files are read back with TensorBoard's own reader."""

from pathlib import Path

import pytest

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from farandole.integrations.tensorboard import EventFile


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
