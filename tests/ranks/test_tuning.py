"""Autotune on working ranks: results stay right, all ranks work with the same in the end, and the file says why."""

import csv
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("optuna")

import farandole.numpy as hvd
from farandole.config import Config
from farandole.core.autotune.tuning_log import HEAD, TuningLog
from farandole.core.context import Context
from farandole.core.default import use
from farandole.errors import ConfigError
from helpers.outcomes import RanksFailed
from helpers.ranks import run_ranks


def one_step(context: Context) -> None:
    with use(context):
        hvd.allreduce(np.ones(3), name="t")


def test_a_job_that_is_too_short_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    config = Config.from_environment({}, autotune=True, autotune_max_samples=6)
    run_ranks(2, one_step, config=config)
    assert "autotune chose nothing: the job ended after 0 samples of 10 steps" in caplog.text


KNOBS = ("fusion_threshold", "slot_bytes", "link_chunk", "link_small", "hierarchical")


def work(context: Context, path: str) -> dict[str, float]:
    """Reduce until rank 0's file holds a result; sums are of whole numbers, so that none may differ."""
    total = sum(range(context.size))
    with use(context):
        tensors = [np.empty(count, np.float32) for count in (5, 3000, 70_000)]
        for _ in range(20_000):
            for tensor in tensors:
                tensor.fill(context.rank)
            handles = [
                hvd.allreduce_async_(tensor, name=f"t{place}", op=hvd.Sum) for place, tensor in enumerate(tensors)
            ]
            for handle, tensor in zip(handles, tensors, strict=True):
                hvd.synchronize(handle)
                assert (tensor == total).all()
            done = np.array([context.rank == 0 and ",chosen," in Path(path).read_text().replace("\n", ",")])
            if hvd.allreduce(done, name="done", op=hvd.Max)[0]:
                # The turn to the result comes with the next operation on which all ranks agree.
                hvd.barrier()
                return hvd.metrics()
    raise AssertionError("there was no result")


@pytest.mark.parametrize(("size", "hosts"), [(2, 1), (4, 2), (3, 2)])
def test_ranks_agree_on_the_result(tmp_path: Path, size: int, hosts: int) -> None:
    path = str(tmp_path / "log.csv")
    config = Config.from_environment(
        {}, autotune=True, autotune_log=path, autotune_max_samples=6, autotune_steps_per_sample=3, link_small=50_000
    )
    metrics = run_ranks(size, work, path, config=config, hosts=hosts)
    with TuningLog(path) as log:
        chosen = log.rows[-1]
        result = log.result(size, hosts)
    assert chosen.phase == "chosen" and result is not None
    for each in metrics:
        assert {name: each[name] for name in KNOBS} == {name: getattr(result, name) for name in KNOBS}
        assert each["knob_turns"] > 6
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["phase"] for row in rows[:9]] == ["warmup"] * 3 + ["search"] * 6
    assert {row["link_small"] for row in rows} == {"50000"}, "what is given stays"
    assert tuple(rows[0]) == HEAD


@pytest.mark.parametrize(
    ("cores", "given", "expected"),
    [(2, {}, 512 << 10), (2, {"FARANDOLE_SLOT_BYTES": "65536"}, 64 << 10), (3, {}, 128 << 10)],
)
def test_ranks_that_share_cores_take_larger_chunks(
    monkeypatch: pytest.MonkeyPatch, cores: int, given: dict[str, str], expected: int
) -> None:
    def body(context: Context) -> float:
        with use(context):
            np.testing.assert_array_equal(
                hvd.allreduce(np.ones(1_000_000), name="x", op=hvd.Sum), np.full(1_000_000, 3)
            )
            return hvd.metrics()["slot_bytes"]

    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    assert run_ranks(3, body, config=Config.from_environment(given)) == [expected] * 3


def test_all_ranks_work_with_what_is_given() -> None:
    def body(context: Context) -> dict[str, float]:
        with use(context):
            hvd.allreduce(np.ones(100_000), name="x", op=hvd.Sum)
            return hvd.metrics()

    config = Config(hierarchical=False, slot_bytes=8192, link_chunk=4096, link_small=0)
    for each in run_ranks(4, body, config=config, hosts=2):
        assert [each[name] for name in KNOBS[1:]] == [8192, 4096, 0, False]


def test_a_job_ends_in_the_middle_of_a_search(tmp_path: Path) -> None:
    def body(context: Context) -> float:
        with use(context):
            for _ in range(50):
                hvd.allreduce(np.ones(10), name="x", op=hvd.Sum)
            return hvd.metrics()["operations"]

    config = Config(autotune=True, autotune_log=str(tmp_path / "log.csv"))
    assert run_ranks(2, body, config=config) == [50, 50]
    with TuningLog(config.autotune_log) as log:
        assert all(row.phase != "chosen" for row in log.rows)


def test_a_damaged_file_is_named_before_ranks_meet(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("nonsense\n")
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, lambda context: None, config=Config(autotune=True, autotune_log=str(path)))
    assert isinstance(caught.value.__cause__, ConfigError)
    assert f"{path}, line 1 cannot be read" in str(caught.value)


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"FARANDOLE_AUTOTUNE_LOG": "t.csv"}, "autotune_log"),
        (
            {"HOROVOD_AUTOTUNE_LOG": "t.csv", "FARANDOLE_AUTOTUNE_MAX_SAMPLES": "5"},
            "autotune_log, autotune_max_samples",
        ),
        ({"FARANDOLE_AUTOTUNE_LOG": "t.csv", "FARANDOLE_AUTOTUNE": "0"}, None),
        ({}, None),
    ],
)
def test_settings_of_autotune_without_it_are_named_once(
    env: dict[str, str], named: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    run_ranks(2, lambda context: None, config=Config.from_environment(env))
    text = f"without autotune these settings do nothing: {named}; set FARANDOLE_AUTOTUNE=1, too"
    assert caplog.messages == ([] if named is None else [text])
    assert not Path("t.csv").exists()
