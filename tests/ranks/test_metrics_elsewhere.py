"""Metrics as Prometheus and TensorBoard read them."""

import urllib.request
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("tensorboard")

from prometheus_client.parser import text_string_to_metric_families as parse
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import farandole.numpy as hvd
from farandole.core.context import Context
from farandole.core.default import use
from farandole.errors import NotInitializedError
from farandole.integrations.prometheus import metrics_text, serve_metrics
from farandole.integrations.tensorboard import EventFile, write_metrics
from helpers.ranks import run_ranks


def test_each_rank_answers_for_itself() -> None:
    def body(context: Context) -> dict[str, tuple[str, float]]:
        with use(context), serve_metrics(0) as port:
            hvd.allreduce(np.ones(5, np.float32), name="x")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                found = parse(answer.read().decode())
            return {sample.name: (sample.labels["rank"], sample.value) for each in found for sample in each.samples}

    for rank, samples in enumerate(run_ranks(2, body)):
        assert samples["farandole_operations_total"] == (str(rank), 1)
        assert samples["farandole_bytes_total"] == (str(rank), 20)
        assert samples["farandole_fused"] == (str(rank), 0)
        assert len(samples) == len(hvd_names())


def test_the_page_follows_another_init() -> None:
    def count() -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            found = {sample.name: sample.value for each in parse(answer.read().decode()) for sample in each.samples}
        return found["farandole_operations_total"]

    hvd.init()
    try:
        hvd.allreduce(np.ones(5), name="x")
        with serve_metrics(0) as port:
            assert count() == 1
            hvd.shutdown()
            assert count() == 1
            hvd.init()
            for _ in range(3):
                hvd.allreduce(np.ones(5), name="x")
            assert count() == 3
    finally:
        hvd.shutdown()


def hvd_names() -> list[str]:
    def body(context: Context) -> list[str]:
        return list(context.metrics())

    return run_ranks(1, body)[0]


def test_before_init() -> None:
    with pytest.raises(NotInitializedError):
        metrics_text()


def test_curves(tmp_path: Path) -> None:
    class Writer:
        def __init__(self) -> None:
            self.points: list[tuple[str, float, int]] = []

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            self.points.append((tag, scalar_value, global_step))

    writer = Writer()

    def body(context: Context) -> None:
        with use(context), EventFile(tmp_path) as events:
            for step in range(3):
                hvd.allreduce(np.ones(2), name="x")
                write_metrics(events, step)
            write_metrics(writer, 3)

    run_ranks(1, body)
    curves = EventAccumulator(str(tmp_path)).Reload()
    assert [each.value for each in curves.Scalars("farandole/operations")] == [1, 2, 3]
    assert ("farandole/bytes", 48, 3) in writer.points
