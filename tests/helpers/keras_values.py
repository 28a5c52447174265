"""Checks of operations on values, saved models and errors, on two ranks with Keras."""

import pickle
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

import farandole.keras as hvd
from farandole.keras.keras_3 import Distributed, ScaledDistributed
from helpers.keras_models import assert_refused, assert_same, build, fit, values


def check_values(rank: int, size: int) -> None:
    mine = np.arange(4.0).reshape(2, 2).astype("float32") + rank
    forms: list[Any] = [mine, keras.ops.convert_to_tensor(mine), keras.Variable(mine)]
    for form in forms:
        results = [
            (hvd.allreduce(form), mine - rank + 0.5),
            (hvd.allreduce(form, op=hvd.Sum, prescale_factor=0.5, name="sum"), mine - rank + 0.5),
            (hvd.allreduce(form, compression=hvd.Compression.fp16), mine - rank + 0.5),
            (hvd.allreduce(form + 0.001, compression=hvd.Compression.bf16), mine - rank + 0.5),
            (hvd.allgather(form), np.concatenate([mine - rank, mine - rank + 1])),
            (hvd.broadcast(form, 1), mine - rank + 1),
            (hvd.reducescatter(form, op=hvd.Sum), (2 * (mine - rank) + 1)[rank : rank + 1]),
        ]
        for got, want in results:
            assert isinstance(got, np.ndarray) == isinstance(form, np.ndarray)
            assert_same(keras.ops.convert_to_numpy(got), want)
    assert float(hvd.allreduce(float(rank))) == 0.5
    assert int(hvd.broadcast(rank + 5, 1)) == 6


def check_variables_are_broadcast(rank: int, size: int) -> None:
    kinds = ("float32", "bfloat16", "float16", "int32", "bool", "uint8")
    held = [keras.Variable(np.full((2, 3), rank), dtype=kind, trainable=False) for kind in kinds]
    scalar = keras.Variable(float(rank))
    hvd.broadcast_variables([*held, scalar], 1)
    for variable in held:
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(keras.ops.cast(variable, "int32")), 1)
    assert float(scalar) == 1.0


class Mine(keras.optimizers.SGD):  # type: ignore[misc]  # Keras ships no types
    """Custom optimizer."""

    def __init__(self, learning_rate: float = 0.1, momentum: float = 0.9, **options: Any) -> None:
        super().__init__(learning_rate, momentum, **options)


def check_saved_models(rank: int, size: int, folder: Path) -> None:
    """A model saved and loaded between two trainings equals one trained without a break; plain Keras reads the file."""
    for suffix, make in (("keras", Mine), ("h5", keras.optimizers.Adam)):
        file = folder / f"{make.__name__}.{suffix}"
        model = fit(build(), hvd.DistributedOptimizer(make(0.02)), rank, size)
        if rank == 0:
            model.save(file)
        hvd.barrier()
        with h5py.File(file) if suffix == "h5" else nullcontext(file) as given:
            loaded = hvd.load_model(given, custom_optimizers=[Mine])
        assert isinstance(loaded.optimizer, make) and int(loaded.optimizer.iterations) == 8
        plain = keras.saving.load_model(file, custom_objects={"Mine": Mine}).optimizer
        assert type(plain).__name__ == make.__name__
        if make is Mine:
            makers = {"Mine": lambda **config: hvd.DistributedOptimizer(Mine(**config), op=hvd.Sum)}
            assert_same(values(hvd.load_model(file, custom_objects=makers)), values(loaded))
        # Keras itself loses the state of an optimizer in an .h5 file.
        read = plain if suffix == "keras" else loaded.optimizer
        for got, want in zip(read.variables, model.optimizer.variables, strict=True):
            assert_same(keras.ops.convert_to_numpy(got), keras.ops.convert_to_numpy(want))

        def go_on(model: Any) -> Any:
            return fit(model, model.optimizer, rank, size)

        assert_same(values(go_on(loaded)), values(go_on(model)))


def check_a_config_makes_another(rank: int, size: int) -> None:
    """An optimizer made from a config reduces like the first; one made with `__class__` is plain, as Keras expects."""
    first = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
    second, variable = first.from_config(first.get_config()), keras.Variable([0.0])
    assert second.get_config() == first.get_config()
    second.apply([keras.ops.convert_to_tensor([float(rank)])], [variable])
    assert float(keras.ops.convert_to_numpy(variable)[0]) == -1.0
    assert type(first.__class__.from_config(first.get_config())) is type(keras.optimizers.SGD(1.0))
    scaler = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0)))
    another = scaler.from_config(scaler.get_config())
    assert isinstance(another, ScaledDistributed) and isinstance(another.inner_optimizer, Distributed)


def check_what_is_refused(rank: int, size: int) -> None:
    def sgd(**options: Any) -> Any:
        return keras.optimizers.SGD(0.1, **options)

    built = sgd()
    built.build([keras.Variable([1.0])])
    unbuilt = keras.layers.Dense(2)
    clipped = [sgd(global_clipnorm=1.0), keras.optimizers.LossScaleOptimizer(sgd(global_clipnorm=1.0))]
    layer = keras.layers.Dense(2)
    layer.build((None, 2))
    cases: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "Average and Sum", lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Adasum)),
        (ValueError, "predivide", lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Sum, gradient_predivide_factor=2.0)),
        (ValueError, "already", lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd()))),
        (TypeError, "str", lambda: hvd.DistributedOptimizer("sgd")),
        (ValueError, "positive", lambda: hvd.DistributedOptimizer(sgd(), groups=-1)),
        (ValueError, "> 0", lambda: hvd.DistributedOptimizer(sgd(), backward_passes_per_step=0)),
        (ValueError, "built", lambda: hvd.DistributedOptimizer(built, backward_passes_per_step=2)),
        (
            ValueError,
            "contradicts",
            lambda: hvd.DistributedOptimizer(sgd(gradient_accumulation_steps=3), backward_passes_per_step=2),
        ),
        (ValueError, "no variables yet", lambda: hvd.PartialDistributedOptimizer(sgd(), local_layers=unbuilt)),
        *(
            (ValueError, "clipvalue", lambda each=each: hvd.PartialDistributedOptimizer(each, local_layers=layer))
            for each in clipped
        ),
        (TypeError, "load_model", lambda: pickle.dumps(hvd.DistributedOptimizer(sgd()))),
        (RuntimeError, "broadcast_variables", lambda: hvd.broadcast_global_variables(0)),
        (ValueError, "legacy", lambda: hvd.load_model("none.keras", legacy_opts=True)),
    ]
    if hasattr(keras.optimizers, "MultiOptimizer"):  # since Keras 3.15
        several = keras.optimizers.MultiOptimizer(lambda variable: built)
        cases.append((ValueError, "own", lambda: hvd.DistributedOptimizer(several, backward_passes_per_step=2)))
        clipping = keras.optimizers.MultiOptimizer(lambda variable: sgd(global_clipnorm=1.0))
        cases.append((ValueError, "clipvalue", lambda: hvd.PartialDistributedOptimizer(clipping, local_layers=layer)))
    for kind, text, call in cases:
        assert_refused(kind, text, call)


def check_one_framework_is_imported(rank: int, size: int) -> None:
    """No other framework's binding is imported; Keras itself imports JAX if it is installed."""
    bindings = {each for each in ("torch", "tensorflow", "jax") if f"farandole.{each}" in sys.modules}
    assert bindings == {keras.backend.backend()}
