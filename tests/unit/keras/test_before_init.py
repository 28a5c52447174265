"""Optimizers of farandole.keras that are made before `init()`."""

import pytest

pytest.importorskip("keras")

from farandole.errors import NotInitializedError


def test_a_model_is_compiled_before_init_and_trained_after_it(frameworks: None) -> None:
    import keras
    import numpy as np

    import farandole.keras as hvd

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer=optimizer, loss="mse")
    variables = model.trainable_variables
    with pytest.raises(NotInitializedError):
        optimizer.apply([keras.ops.zeros(each.shape) for each in variables], variables)
    hvd.init()
    try:
        before = np.asarray(keras.ops.convert_to_numpy(variables[0]))
        optimizer.apply([keras.ops.ones(each.shape) for each in variables], variables)
        np.testing.assert_allclose(keras.ops.convert_to_numpy(variables[0]), before - 0.1, rtol=1e-5)
    finally:
        hvd.shutdown()
