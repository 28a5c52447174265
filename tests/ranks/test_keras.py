"""farandole.keras on each backend of Keras, on two ranks."""

from pathlib import Path

import pytest

from farandole.core.context import Context
from farandole.core.default import use
from farandole.meeting.rendezvous import SoloRendezvous
from helpers.installed import require
from helpers.keras_ranks import BACKENDS, run_checks
from helpers.ranks import run_ranks


@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = ["keras_training", "keras_callbacks", "keras_values", "keras_elastic", "keras_elastic_reports"]
    run_checks(backend, modules, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_ranks_with_keras_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("tf_keras")
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    run_checks("tensorflow", ["keras_2"], tmp_path, monkeypatch)


def test_an_optimizer_sees_the_size_of_each_job(frameworks: None) -> None:
    require("keras", "tensorflow")
    from farandole.keras.backend import Options
    from farandole.keras.exchange import Exchange

    def body(context: Context) -> None:
        exchange = Exchange(Options())
        with Context(SoloRendezvous()) as alone, use(alone):
            assert exchange.alone
        assert not exchange.alone

    run_ranks(2, body)


def test_an_optimizer_is_named_anew_in_each_job(frameworks: None) -> None:
    require("keras", "tensorflow")
    from farandole.keras.backend import Options
    from farandole.keras.exchange import Exchange

    kept, given = Exchange(Options()), Exchange(Options(), name="mine")
    for _ in range(2):
        others = [Exchange(Options()), Exchange(Options())]
        with Context(SoloRendezvous()) as context:
            for _ in range(2):  # in one job the names stay
                with use(context):
                    names = [each._named() for each in (others[0], kept, others[1], given)]
                assert names == ["optimizer.noname.0", "optimizer.noname.1", "optimizer.noname.2", "mine"]
