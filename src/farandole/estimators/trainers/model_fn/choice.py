"""Choice of the program: a graph for an `EstimatorSpec`, eager training for a compiled Keras model."""

import inspect
from pathlib import Path

import keras

import farandole.tensorflow as hvd
from farandole.errors import ConfigError
from farandole.estimators.trainers.keras.model import DumpedModel
from farandole.estimators.trainers.model_fn.graph import Built, GraphProgram, call, config_of
from farandole.estimators.trainers.model_fn.job import ModelFnJob, Program, Table
from farandole.estimators.trainers.model_fn.keras_model import KerasProgram
from farandole.tensorflow.estimator import ModeKeys

__all__ = ["choose_program"]


def choose_program(job: ModelFnJob, table: Table, folder: Path | None) -> Program:
    """Return this rank's program for a Keras model, or for the result of a model function.

    A function without an argument `features` must return a Keras model. If a function with it returns one, it is called
    again, with Keras inputs as features instead of the tensors of a graph. Raises `ConfigError` for other results."""
    model_fn = job.model_fn
    if isinstance(model_fn, DumpedModel):
        return KerasProgram(job, table, folder, model_fn.load())
    taken = inspect.signature(model_fn).parameters.values()
    if any(each.name == "features" or each.kind == each.VAR_KEYWORD for each in taken):
        training = Built(job, table, ModeKeys.TRAIN, seed=job.seed + hvd.rank())
        if not isinstance(training.given, keras.Model):
            return GraphProgram(job, table, folder, training)
    keras.backend.clear_session()  # resets the counters in layers' names, which name inputs and outputs
    features = {
        name: keras.Input([] if width is None else [width], dtype=dtype, name=name)
        for name, (dtype, width) in table.features.items()
    }
    model = call(model_fn, features, None, ModeKeys.TRAIN, dict(job.params), config_of(job))
    if not isinstance(model, keras.Model):
        raise ConfigError("modelFn", f"has no argument features, so it must return a keras.Model, got {model!r}")
    return KerasProgram(job, table, folder, model)
