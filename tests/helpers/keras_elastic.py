"""Checks of elastic states and their callbacks for one backend of Keras, run by `keras_ranks`."""

import keras
import numpy as np

import farandole.keras as hvd
from farandole.core import default

ROWS = np.ones((8, 2), np.float32)


def built(rank: int, dropout: float = 0.0) -> keras.Model:
    layers = [keras.layers.Input((2,)), keras.layers.Dense(1), keras.layers.Dropout(dropout)]
    model = keras.Sequential(layers)
    model.set_weights([weights + rank for weights in model.get_weights()])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    return model


def values(model: keras.Model) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(each)) for each in [*model.weights, *model.optimizer.variables]]


def check_states_are_taken_over_and_restored(rank: int, size: int) -> None:
    model = built(rank)
    state = hvd.elastic.KerasState(model, epoch=rank, batch=7)
    assert state.model is model
    state.sync()
    assert (state.epoch, state.batch) == (0, 7)
    assert all(len(set(map(float, hvd.allgather_object(each.sum())))) == 1 for each in values(model))
    model.fit(ROWS, ROWS[:, :1], batch_size=4, verbose=0)
    state.epoch = 1
    state.commit()
    before = values(model)
    model.fit(ROWS, ROWS[:, :1], batch_size=4, verbose=0)
    state.epoch = 2
    assert not np.array_equal(values(model)[0], before[0])
    state.restore()
    assert state.epoch == 1
    for mine, saved in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(mine, saved)


def check_fit_goes_on_after_a_step_that_has_failed(rank: int, size: int) -> None:
    model = built(0, dropout=0.5)  # which has a state of its own
    state = hvd.elastic.KerasState(model)
    state.sync()
    before = values(model)

    class Failing(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            raise RuntimeError("between steps")

    try:
        model.fit(ROWS, ROWS[:, :1], batch_size=4, verbose=0, callbacks=[Failing()])
    except RuntimeError:
        state.restore()
    for mine, saved in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(mine, saved)
    model.fit(ROWS, ROWS[:, :1], batch_size=4, verbose=0)


def check_callbacks_keep_count(rank: int, size: int) -> None:
    model = built(0)
    state = hvd.elastic.KerasState(model, epoch=3, batch=0)
    commits: list[tuple[int, int]] = []

    class Commit(hvd.elastic.CommitStateCallback):
        def commit(self) -> None:
            commits.append((state.epoch, state.batch))
            super().commit()

    callbacks = [
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        Commit(state, batches_per_commit=2),
    ]
    model.fit(ROWS, ROWS[:, :1], batch_size=2, epochs=2, verbose=0, callbacks=callbacks)
    # After batches 2 and 4 of the epoch, and at its end.
    assert commits == [(3, 2), (3, 4), (4, 0), (4, 2), (4, 4), (5, 0)]
    commits.clear()
    state.epoch, state.batch = 1, 1  # as after a reset: the first epoch has one batch less
    model.fit(ROWS, ROWS[:, :1], batch_size=2, initial_epoch=1, epochs=3, verbose=0, callbacks=callbacks)
    assert commits == [(1, 3), (2, 0), (2, 1), (2, 3), (3, 0)]


def check_a_schedule_goes_on_in_the_middle_of_an_epoch(rank: int, size: int) -> None:
    model = built(0)
    state = hvd.elastic.KerasState(model, epoch=0, batch=2)  # as after a reset
    rates: list[float] = []

    class Noting(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 1 + epoch, staircase=False)
    callbacks = [schedule, hvd.elastic.UpdateBatchStateCallback(state), Noting()]
    model.fit(ROWS, ROWS[:, :1], batch_size=2, epochs=2, verbose=0, callbacks=callbacks)
    np.testing.assert_allclose(rates, [0.15, 0.175, 0.2, 0.225, 0.25, 0.275], rtol=1e-5)


def check_weights_that_another_callback_has_loaded_are_noticed(rank: int, size: int) -> None:
    class Loading(keras.callbacks.Callback):  # type: ignore[misc]  # as BackupAndRestore does
        def __init__(self, ranks: list[int]) -> None:
            super().__init__()
            self.ranks = ranks

        def on_train_begin(self, logs: object = None) -> None:
            if rank in self.ranks:
                self.model.set_weights([weights + 1 for weights in self.model.get_weights()])

    model = built(rank)
    state = hvd.elastic.KerasState(model)
    state.sync()
    last = hvd.elastic.CommitStateCallback(state)
    refused: list[str] = []
    for ranks, callbacks in (
        ([], [last]),
        ([0], [last]),
        # Rank 0 loads them, and the others take them over.
        ([0], [hvd.callbacks.BroadcastGlobalVariablesCallback(0), last]),
        ([0, 1], [last]),
    ):
        try:
            model.fit(ROWS, ROWS[:, :1], batch_size=4, verbose=0, callbacks=[Loading(ranks), *callbacks])
        except ValueError as error:
            refused.append(str(error))
            state.restore()
    assert len(refused) == 1 and "only ranks [0] begin with other weights" in refused[0], refused
    assert len(set(hvd.allgather_object(model.get_weights()[0].tobytes()))) == 1


def check_an_epoch_that_was_lost_does_not_keep_the_next_one_from_stopping(rank: int, size: int) -> None:
    model = built(0)
    state = hvd.elastic.KerasState(model, batch=2)
    counting = hvd.elastic.UpdateBatchStateCallback(state)
    ended: list[int] = []

    class Stopping(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if state.batch == 4:
                state.batch = 0
                raise RuntimeError("after the last batch")

        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            ended.append(epoch)
            self.model.stop_training = True

    try:
        model.fit(ROWS, ROWS[:, :1], batch_size=2, verbose=0, callbacks=[counting, Stopping()])
    except RuntimeError:
        model.fit(ROWS[:4], ROWS[:4, :1], batch_size=2, epochs=2, verbose=0, callbacks=[Stopping(), counting])
    assert ended == [0]


def check_a_rank_that_is_alone_exchanges_once_it_is_elastic(rank: int, size: int) -> None:
    alone = hvd.ProcessSet([0])
    hvd.add_process_set(alone)
    try:
        if rank == 0:
            exchange = hvd.DistributedOptimizer(keras.optimizers.SGD(), process_set=alone)._exchange
            assert exchange.alone
            is_elastic = default.is_elastic
            default.is_elastic = lambda: True
            try:
                assert not exchange.alone
                model = built(0)
                divided = exchange.reduce([keras.ops.ones(2)], [0])
                exchange.local.add(0)
                divided += exchange.reduce([keras.ops.ones(2)], [0])
            finally:
                default.is_elastic = is_elastic
            assert model.built
            np.testing.assert_array_equal(np.stack([keras.ops.convert_to_numpy(each) for each in divided]), 1)
    finally:
        hvd.remove_process_set(alone)


def check_a_model_must_be_built(rank: int, size: int) -> None:
    try:
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))
    except ValueError as error:
        assert "no weights yet" in str(error)
    else:
        raise AssertionError("a model without weights was taken")


def check_variables_are_those_of_the_other_ranks_and_of_the_last_commit(rank: int, size: int) -> None:
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    state = hvd.elastic.KerasState(model)
    state.sync()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    if rank == 1:
        model.compile(optimizer, "mse")
    for call, text in ((state.sync, "alike on all ranks"), (state.restore, "in the last commit")):
        try:
            call()
        except ValueError as error:
            assert text in str(error)
        else:
            assert call == state.restore and rank == 0
