"""A rank's view of its GPUs."""

import pytest

from farandole.spark.jobs.child import available_devices


@pytest.mark.parametrize(("visible", "own"), [("4,5", ["1"]), ("", []), ("-1", [])])
def test_a_rank_has_a_device_unless_all_are_hidden(
    visible: str, own: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("FARANDOLE_LOCAL_RANK", "1")
    assert available_devices() == own
