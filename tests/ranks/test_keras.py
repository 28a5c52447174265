"""farandole.keras on each backend of Keras, on two ranks."""

import threading
from datetime import timedelta
from pathlib import Path

import pytest

from farandole.config import Config
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


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("passes", [None, 2])
def test_gradients_of_different_variables_are_not_mixed(passes: int | None, frameworks: None) -> None:
    require("keras", "tensorflow")
    import keras

    import farandole.keras as hvd

    both = threading.Barrier(2)  # whose time is up first must not end before the other's is

    def body(context: Context) -> None:
        sgd = keras.optimizers.SGD(1.0, gradient_accumulation_steps=passes)
        optimizer = hvd.DistributedOptimizer(sgd, name="mine")
        variables = [keras.Variable([0.0]) for _ in range(3)]
        optimizer.build(variables)
        gradients = [keras.ops.ones(1), None, keras.ops.ones(1)]
        if context.rank == 1:
            gradients[:2] = reversed(gradients[:2])
        with pytest.raises(Exception, match=rf"mine\.without\.{1 - context.rank}.*rank"):
            for _ in range(passes or 1):
                optimizer.apply(gradients, variables)
        both.wait(60)

    run_ranks(2, body, config=Config(collective_timeout=timedelta(seconds=1)))


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
