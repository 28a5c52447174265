"""Checks of elastic Keras as public reports against Horovod describe it, run by `keras_ranks`."""

import keras
import numpy as np

import farandole.keras as hvd

ROWS = np.ones((8, 2), np.float32)


def made() -> keras.Model:
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse")
    return model


def check_epochs_are_counted_once(rank: int, size: int) -> None:
    """horovod #2844: `state.epoch` counted epochs twice in programs that give `fit` an `initial_epoch`."""
    state = hvd.elastic.KerasState(made(), epoch=0, batch=0)
    state.sync()
    for done in (3, 5):  # of `fit`'s calls, as after a reset
        callbacks = [hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.CommitStateCallback(state)]
        state.model.fit(ROWS, ROWS[:, :1], initial_epoch=state.epoch, epochs=done, callbacks=callbacks, verbose=0)
        assert state.epoch == done
    state.model.fit(ROWS, ROWS[:, :1], epochs=8 - state.epoch, callbacks=callbacks, verbose=0)
    assert state.epoch == 8


def check_a_rank_that_comes_gets_the_optimizer(rank: int, size: int) -> None:
    """horovod #2652, #2285: a new rank, whose optimizer had no variables yet, waited for others in the sync."""
    alone = hvd.ProcessSet([0])
    hvd.add_process_set(alone)
    model = made()
    if rank == 0:  # which has trained before the other one came
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1), process_set=alone), "mse")
        model.fit(ROWS, ROWS[:, :1], verbose=0, epochs=2)
    hvd.elastic.KerasState(model, epoch=0).sync()
    steps = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
    assert hvd.allgather_object(steps) == [2, 2]
    values = [float(keras.ops.convert_to_numpy(each).sum()) for each in model.optimizer.variables]
    assert hvd.allgather_object(values)[0] == values
    hvd.remove_process_set(alone)
