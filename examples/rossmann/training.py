"""Two ways to train the network on encoded rows: a Spark ML estimator, and a training function on all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from pyspark.sql import DataFrame

import farandole.keras as hvd
from farandole.data import FeedLoader
from farandole.spark import HorovodRunner
from farandole.spark.keras import KerasEstimator, KerasModel
from farandole.spark.store import FilesystemStore
from farandole.tensorflow.data import make_dataset
from rossmann.features import CODES, LABEL, MEASURES, Encoding
from rossmann.model import RMSPE, build

_INPUTS = [*CODES, MEASURES]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Hyperparameters; `batch_size` and `learning_rate` are those of one rank."""

    ranks: int = 2
    epochs: int = 8
    batch_size: int = 64
    learning_rate: float = 0.001
    hidden: tuple[int, ...] = (256, 128)
    dropout: float = 0.05
    seed: int = 1


def fit_by_estimator(rows: DataFrame, encoding: Encoding, settings: Settings, store: FilesystemStore) -> KerasModel:
    """Train on the rows of train.csv by `KerasEstimator`; the best epoch is kept as best.keras in the store."""
    keras.utils.set_random_seed(settings.seed)
    estimator = KerasEstimator(
        num_proc=settings.ranks,
        model=_build(encoding, settings),
        optimizer=keras.optimizers.Adam(settings.learning_rate),
        loss="mse",
        metrics=[RMSPE()],
        feature_cols=_INPUTS,
        label_cols=[LABEL],
        validation="Validation",
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        random_seed=settings.seed,
        store=store,
        checkpoint_callback=hvd.callbacks.BestModelCheckpoint(monitor="val_rmspe", mode="min"),
    )
    return estimator.fit(rows)


def fit_by_runner(rows: DataFrame, encoding: Encoding, settings: Settings) -> KerasModel:
    """Train on the rows of train.csv by `HorovodRunner`, which feeds two DataFrames to `train` on each rank."""
    columns = [*_INPUTS, LABEL]
    model = _build(encoding, settings)
    weights, history = HorovodRunner(np=settings.ranks).run(
        train,
        rows=rows.where("NOT Validation").select(columns),
        validation=rows.where("Validation").select(columns),
        config=model.to_json(),
        settings=settings,
    )
    model.set_weights(weights)
    return KerasModel(model=model, feature_columns=_INPUTS, label_columns=[LABEL], history=history, run_id="runner")


def train(
    rows: Any, validation: Any, config: str, settings: Settings
) -> tuple[list[NDArray[Any]], list[dict[str, float]]]:
    """Train on this rank's share of both DataFrames; return the weights, and the values of each epoch."""
    hvd.init()
    keras.utils.set_random_seed(settings.seed + hvd.rank())
    model = keras.models.model_from_json(config)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(settings.learning_rate * hvd.size()))
    model.compile(optimizer=optimizer, loss="mse", weighted_metrics=[RMSPE()], jit_compile=False)
    fitted = model.fit(
        _dataset(rows, settings),
        validation_data=_dataset(validation, settings),
        epochs=settings.epochs,
        shuffle=False,  # the loader does it
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()],
        verbose=0,
    )
    epochs = [dict(zip(fitted.history, values, strict=True)) for values in zip(*fitted.history.values(), strict=True)]
    weights = [np.asarray(each) for each in model.get_weights()]
    return weights, [{"epoch": number, **values} for number, values in enumerate(epochs, 1)]


def _build(encoding: Encoding, settings: Settings) -> Any:
    return build(
        encoding.cardinalities, label_scale=encoding.scales[LABEL], hidden=settings.hidden, dropout=settings.dropout
    )


def _dataset(rows: Any, settings: Settings, columns: Sequence[str] = (*_INPUTS, LABEL)) -> Any:
    """Return batches of inputs, label and weights; rows that fill a rank's last batch have weight 0."""
    loader = FeedLoader(
        rows, columns=list(columns), batch_size=settings.batch_size, policy="pad", seed=settings.seed,
        rank=hvd.rank(), size=hvd.size(), gather=hvd.allgather_object,
    )  # fmt: skip
    dataset = make_dataset(loader, weights="weight").map(
        lambda batch: (tuple(batch[name] for name in _INPUTS), batch[LABEL][:, None], batch["weight"])
    )
    return dataset.apply(tf.data.experimental.assert_cardinality(len(loader)))
