"""Keras on Spark DataFrames: `KerasEstimator(...).fit(df)` returns a `KerasModel`, whose `transform` predicts."""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Self

import cloudpickle

from farandole.errors import ConfigError
from farandole.extras import importing

with importing("farandole.spark.keras"):
    import keras

    from farandole.estimators import checks
    from farandole.estimators.backend import saved_environment
    from farandole.estimators.checked_params import Parameter, optional, required, setter
    from farandole.estimators.estimator import DataFrameEstimator
    from farandole.estimators.folders import Folder
    from farandole.estimators.history import NO_SCORES
    from farandole.estimators.params import check_together
    from farandole.estimators.persistence import PARAMETERS, Facts, dumped_parameters, loaded_parameters
    from farandole.estimators.predictions.batches import BatchPredictor
    from farandole.estimators.predictions.keras import KerasPredictor
    from farandole.estimators.trainers.checkpoint import Checkpoint
    from farandole.estimators.trainers.keras.model import (
        Inputs,
        all_custom_objects,
        choose_backend,
        dump_model,
        dump_object,
        load_model,
        load_object,
        load_state,
        model_file,
        optimizer_variables,
        read_model,
    )
    from farandole.estimators.trainers.keras.training import KerasJob, train
    from farandole.estimators.trainers.run import RunPlan
    from farandole.estimators.transformer import DataFrameModel
    from farandole.keras.backend import Model, Optimizer
    from farandole.keras.generation import generation_of

_FILE, _CUSTOM = "model.keras", "custom_objects.pickle"
# Names of metrics for which `compile` chooses a function by the output's shape, in Keras 3 and in Keras 2 only.
_BY_SHAPE, _BY_SHAPE_2 = ("accuracy", "acc"), ("crossentropy", "ce")
_BY_WEIGHTS = "mean_with_sample_weight"  # a reduction of Keras' losses


def _model(value: object) -> Model:
    library = generation_of(value).library
    if not isinstance(value, library.Model):
        raise checks.Refused(f"must be a Model of Keras 3 or tf_keras, got {type(value).__name__}")
    if library is not keras and keras.config.backend() != "tensorflow":
        raise checks.Refused(f"is of tf_keras; set KERAS_BACKEND=tensorflow, not {keras.config.backend()}")
    return value


def _optimizer(value: object) -> Optimizer | str:
    made = keras.optimizers.get(value) if isinstance(value, str) else value  # raises an error for an unknown name
    if not isinstance(made, generation_of(made).KINDS):
        raise checks.Refused(f"must be an optimizer of Keras or its name, got {type(value).__name__}")
    return value


def _callbacks(value: object) -> list[keras.callbacks.Callback]:
    given = checks.objects(value)
    if not all(isinstance(each, generation_of(each).library.callbacks.Callback) for each in given):
        raise checks.Refused(f"must be a list of keras.callbacks.Callback, got {value!r}")
    return given


def _checkpoint(value: object) -> keras.callbacks.ModelCheckpoint:
    if not isinstance(value, generation_of(value).library.callbacks.ModelCheckpoint):
        raise checks.Refused(f"must be a ModelCheckpoint, got {type(value).__name__}")
    return value


def _listed(value: object) -> object:
    """Accept what `compile` takes: a dict by the names of outputs, a list, or one object, which becomes a list."""
    return dict(value) if isinstance(value, Mapping) else checks.objects(value)


def _per_output(setting: str, value: object, model: Model, missing: object = None) -> list[Any]:
    """Return an argument of `compile` as a list with an item per output, or with one item for all outputs.

    `missing` stands for outputs that a dict leaves out; None: it has to have all. Raises `ConfigError` for others."""
    if not isinstance(value, Mapping):
        return list(value) if isinstance(value, (list, tuple)) else [value]
    outputs = getattr(model, "output", None)
    # The names of outputs in a dictionary are its keys; `output_names` are the layers'.
    names = sorted(outputs) if isinstance(outputs, Mapping) else list(getattr(model, "output_names", None) or ())
    if missing is not None:
        value = {**dict.fromkeys(names, missing), **value}
    if sorted(names) != sorted(value):
        has = f"its outputs are {names}" if names else "the names of its outputs are unknown"
        raise ConfigError(setting, f"of the model has the names {list(value)}, and {has}; give a list, one per label")
    return [value[name] for name in names]


def _is_in(module: ModuleType, value: object) -> bool:
    """Return whether `value` is a loss or a metric, or the name of one, for Keras' module of them."""
    try:
        return callable(module.get(value))  # Keras 2 returns names that it does not know
    except (TypeError, ValueError):
        return False


def _environment(value: object) -> dict[str, str]:
    given = checks.mapping(value)
    if wrong := ", ".join(name for name, each in given.items() if not isinstance(each, str)):
        raise checks.Refused(f"holds values that are not texts, of {wrong}; write them in quotes")
    return {name: str(each) for name, each in given.items()}


class KerasEstimator(DataFrameEstimator["KerasModel"]):
    """Trains a model of Keras 3 or tf_keras on a DataFrame's rows, on `num_proc` ranks, with this process' backend.

    The model takes one input per feature column and returns one output per label column. `loss`, `loss_weights`,
    `metrics` and `optimizer` are arguments of `compile`; `optimizer` and `loss` default to those of a compiled model,
    `loss_weights` to those of its loss. The learning rate is multiplied by the number of ranks, and the gradient is
    the mean over all rows of a step. `callbacks` run on every rank and see the values of all ranks; when one stops the
    training, all ranks stop. `checkpoint_callback`, a `ModelCheckpoint`, writes into the run's folder of the store.
    Checkpoints, resumes and errors are those of `TorchEstimator`.
    """

    _kind = "keras"

    model: Parameter[Model, Model] = Parameter("the keras.Model to train", _model)
    setModel, getModel = required(model)

    optimizer: Parameter[Optimizer | str, Optimizer | str] = Parameter(
        "Keras optimizer, or its name; default: that of the compiled model", _optimizer
    )
    setOptimizer = setter(optimizer)

    def getOptimizer(self) -> Optimizer | None:
        given = self._value(self.optimizer)
        if isinstance(given, str):
            return generation_of(self._value(self.model)).library.optimizers.get(given)
        return getattr(self.getModel(), "optimizer", None) if given is None else given

    loss: Parameter[object, object] = Parameter(
        "Keras loss, its name, or a function: one for all labels, or one per label as a list or a dict by output",
        _listed,
    )
    setLoss = setter(loss)

    def getLoss(self) -> list[object]:
        given = self._value(self.loss)
        if given is None:
            given = getattr(self.getModel(), "loss", None)
        if given is None:
            raise ConfigError("loss", f"is not set, and the model is not compiled: {self.loss.doc}")
        return _per_output("loss", given, self.getModel())

    def getLossWeights(self) -> list[float] | None:
        given, model = super().getLossWeights(), self._value(self.model)
        if given is None and self._value(self.loss) is None:
            compiled = getattr(model, "_compile_loss", None) or getattr(model, "compiled_loss", None)
            given = getattr(compiled, "_user_loss_weights", None)
        return None if given is None else _per_output("loss_weights", given, model)

    metrics: Parameter[object, object] = Parameter(
        "Keras metrics, their names, or functions; with several labels a list per label, or a dict by output", _listed
    )
    setMetrics = setter(metrics)

    def getMetrics(self) -> list[object]:
        given = self._value(self.metrics)
        if not isinstance(given, Mapping):
            return checks.objects(given or [])
        each: list[object] = [
            checks.objects(one) for one in _per_output("metrics", given, self._value(self.model), missing=[])
        ]
        return checks.objects(each[0]) if len(each) == 1 else each

    callbacks: Parameter[Sequence[keras.callbacks.Callback], list[keras.callbacks.Callback]] = Parameter(
        "Keras callbacks, which run on every rank", _callbacks
    )
    setCallbacks, getCallbacks = optional(callbacks, list)

    custom_objects: Parameter[Mapping[str, object], dict[str, object]] = Parameter(
        "classes and functions of the model, by name", checks.mapping
    )
    setCustomObjects, getCustomObjects = optional(custom_objects, dict)

    checkpoint_callback: Parameter[keras.callbacks.ModelCheckpoint, keras.callbacks.ModelCheckpoint] = Parameter(
        "ModelCheckpoint that writes into the store", _checkpoint
    )
    setCheckpointCallback, getCheckpointCallback = optional(checkpoint_callback)

    backend_env: Parameter[Mapping[str, str], dict[str, str]] = Parameter(
        "environment variables for the ranks", _environment
    )
    setBackendEnv, getBackendEnv = optional(backend_env, dict)

    def _contents(self) -> tuple[dict[str, object], dict[str, bytes]]:
        # Keras' own pickles can be read only where custom classes are registered.
        plain, keras_own = self.copy(), {}
        for each in (self.model, self.optimizer, self.loss, self.metrics):
            if self.isSet(each):
                value = self.getOrDefault(each)
                custom = self.getCustomObjects()
                keras_own[each.name] = dump_model(value, custom) if each is self.model else dump_object(value)
                plain.clear(each)
        if self.isSet(self.backend_env):
            plain.setBackendEnv(saved_environment(self.getBackendEnv(), "setBackendEnv"))
        facts: dict[str, object] = {"backend": keras.config.backend()}
        return facts, {PARAMETERS: dumped_parameters(plain), "keras.pickle": cloudpickle.dumps(keras_own)}

    @classmethod
    def _revived(cls, facts: Facts, folder: Folder) -> Self:
        choose_backend(facts["backend"])
        estimator = cls()
        estimator._set(**loaded_parameters(folder.read(PARAMETERS)))
        for name, value in cloudpickle.loads(folder.read("keras.pickle")).items():
            estimator._set(**{name: load_model(value) if name == "model" else load_object(value)})
        return estimator

    def _environment(self) -> dict[str, str]:
        legacy = {} if generation_of(self.getModel()).library is keras else {"TF_USE_LEGACY_KERAS": "1"}
        return {"KERAS_BACKEND": keras.config.backend(), **legacy, **super()._environment(), **self.getBackendEnv()}

    def _known(self, setting: str, given: Sequence[object]) -> list[Any]:
        """Return losses or metrics, with the custom objects in place of their names.

        Raises `ConfigError` for those that the model's Keras does not know."""
        library, custom = generation_of(self.getModel()).library, self.getCustomObjects()
        by_shape = _BY_SHAPE if library is keras else _BY_SHAPE + _BY_SHAPE_2
        module, names = (library.losses, ()) if setting == "loss" else (library.metrics, by_shape)
        known: list[Any] = []
        for each in given:
            if isinstance(each, (list, tuple)):
                known.append(self._known(setting, each))
                continue
            known.append(custom.get(each, each) if isinstance(each, str) else each)
            if each is not None and str(each).lower() not in names and not _is_in(module, known[-1]):
                name = f"{library.__name__}.{'losses' if setting == 'loss' else setting}"
                raise ConfigError(
                    setting,
                    f"holds {each!r}, which is not in {name}; give a name or an object of {name}, a function, or a "
                    "name in custom_objects",
                )
        return known

    def _check(self) -> None:
        losses = self._known("loss", self.getLoss())
        check_together(self, len(losses))
        if any(getattr(each, "reduction", None) == _BY_WEIGHTS for each in losses):
            raise ConfigError(
                "loss",
                f"has reduction={_BY_WEIGHTS!r}, which removes the weights that make a step the mean over all rows; "
                "use 'sum_over_batch_size'",
            )
        self._known("metrics", self.getMetrics())
        if (optimizer := self.getOptimizer()) is None:
            raise ConfigError("optimizer", "is not set, and the model is not compiled")
        own, its = (generation_of(each).library.__name__ for each in (self.getModel(), optimizer))
        if own != its:
            raise ConfigError("optimizer", f"is of {its}, and the model of {own}; take both from one")
        if not self.getModel().built:
            raise ConfigError("model", "has no weights yet; call it on a batch, or build(), before fit")
        if self.getCheckpointCallback() is not None and self.getStore() is None:
            raise ConfigError("checkpoint_callback", "writes into the store, which is not set")
        Inputs.of(self.getModel(), self.getFeatureCols())

    def _task(self, plan: RunPlan) -> Callable[[], bytes | None]:
        losses, labels = self._known("loss", self.getLoss()), self.getLabelCols()
        optimizer = self.getOptimizer()
        assert optimizer is not None  # see `_check`
        used = getattr(optimizer, "built", True) and int(optimizer.iterations) > 0  # legacy ones are never built
        held = optimizer_variables(optimizer, self.getModel().trainable_variables) if used else []
        job = KerasJob(
            plan=plan,
            model=dump_model(self.getModel(), self.getCustomObjects()),
            optimizer=dump_object(optimizer),
            optimizer_state=[keras.ops.convert_to_numpy(each) for each in held],
            loss=dump_object(losses[0] if len(labels) == 1 else losses * (len(labels) if len(losses) == 1 else 1)),
            loss_weights=self.getLossWeights(),
            metrics=dump_object(self._known("metrics", self.getMetrics())),
            callbacks=self.getCallbacks(),
            checkpoint_callback=self.getCheckpointCallback(),
            inputs=Inputs.of(self.getModel(), self.getFeatureCols()),
        )
        return functools.partial(train, job)

    def _trained(self, run_id: str, checkpoint: Checkpoint) -> "KerasModel":
        assert checkpoint.outputs is not None
        # A copy: fitting again, with another seed for example, starts from the weights that the user gave.
        model = load_model(dump_model(self.getModel(), self.getCustomObjects()))
        weights, *_ = load_state(checkpoint.weights)
        model.set_weights(weights)
        return KerasModel(
            model=model,
            feature_columns=self.getFeatureCols(),
            label_columns=self.getLabelCols(),
            custom_objects=self.getCustomObjects(),
            outputs=checkpoint.outputs,
            history=checkpoint.history,
            run_id=run_id,
        )


class KerasModel(DataFrameModel[Model]):
    """A trained model; `transform` adds one column per label, a number or an array for each row.

    Made by `KerasEstimator.fit`, or from any `keras.Model`. `outputs` holds the type and the shape of one row of each
    output; without it the first `transform` runs the model on one row of the DataFrame.
    """

    def __init__(
        self,
        *,
        model: Model,
        feature_columns: Sequence[str],
        label_columns: Sequence[str],
        custom_objects: Mapping[str, object] | None = None,
        outputs: Sequence[tuple[str, Sequence[int]]] | None = None,
        history: Sequence[Mapping[str, float]] = (),
        run_id: str = "",
    ) -> None:
        super().__init__(
            model=model, feature_columns=feature_columns, label_columns=label_columns, outputs=outputs,
            history=history, run_id=run_id,
        )  # fmt: skip
        self._custom_objects = dict(custom_objects or {})

    @staticmethod
    def _checked(model: Model) -> Model:
        return KerasEstimator.model.checked(model)

    def getCustomObjects(self) -> dict[str, object]:
        return dict(self._custom_objects)

    def getHistory(self) -> dict[str, list[float]]:
        """Return the values of all epochs by name, in the form of the history of Keras' `fit`."""
        names = dict.fromkeys(name for record in self.history for name in record if name not in NO_SCORES)
        return {name: [record[name] for record in self.history if name in record] for name in names}

    def _facts(self) -> dict[str, object]:
        return {"backend": keras.config.backend()}

    def _dumped(self) -> dict[str, bytes]:
        custom = all_custom_objects(self._model, self._custom_objects)
        return {_FILE: model_file(self._model), _CUSTOM: cloudpickle.dumps(custom)}

    @classmethod
    def _revived(cls, facts: Facts, folder: Folder) -> Self:
        given = dict(facts)
        choose_backend(given.pop("backend"))
        custom = cloudpickle.loads(folder.read(_CUSTOM))
        return cls(model=read_model(folder.read(_FILE), custom), custom_objects=custom, **given)

    def _predictor(self, names: Sequence[str]) -> BatchPredictor:
        return KerasPredictor(
            model=dump_model(self._model, self._custom_objects),
            backend=keras.config.backend(),
            inputs=Inputs.of(self._model, self.getFeatureColumns()),
            names=tuple(names),
        )
