"""A fitted model as a Spark ML transformer: adds a column of predictions per label."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import pandas as pd
from pyspark.ml import Model
from pyspark.ml.functions import array_to_vector
from pyspark.ml.linalg import VectorUDT
from pyspark.ml.param import Param
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.types import StructType

from farandole.errors import ConfigError, DataError
from farandole.estimators.checked_params import CheckedParams, Parameter, required
from farandole.estimators.checks import names_of_columns, objects
from farandole.estimators.feed import as_numbers, check_columns, numbers_without_nulls
from farandole.estimators.history import History
from farandole.estimators.local_rows import as_frame, feature_batches, features_of, in_memory
from farandole.estimators.persistence import Saved
from farandole.estimators.predictions.batches import BatchPredictor, column_type
from farandole.spark.jobs.interpreter import use_own_interpreter
from farandole.spark.rows.column_names import check_names, taken_names

N = TypeVar("N")

_PREDICTED = "__farandole_predicted"
# Params of Horovod's fitted models that are none here, with what returns their values.
_NO_PARAMS = {"model": "call getModel()", "history": "read the attribute history", "run_id": "call getRunId()"}


class DataFrameModel(Model, CheckedParams, Saved, Generic[N]):
    """The result of an estimator's `fit`; `transform` keeps all columns and adds `<label>__output` for each label.

    An output with one number per row is a column of numbers, others are arrays. If the label column of `fit` held
    vectors of pyspark.ml, the output is a vector. `outputs` holds the type and the shape of one row of each output;
    without it the first `transform` runs the model on one row of the DataFrame."""

    feature_columns: Parameter[Sequence[str], list[str]] = Parameter("columns that the model takes", names_of_columns)
    setFeatureColumns, getFeatureColumns = required(feature_columns)

    label_columns: Parameter[Sequence[str], list[str]] = Parameter("columns that it was trained on", names_of_columns)
    getLabelColumns = required(label_columns)[1]

    output_cols: Parameter[Sequence[str], list[str]] = Parameter(
        "columns that transform adds, one per label", names_of_columns
    )
    setOutputCols, getOutputCols = required(output_cols)

    vector_labels: Parameter[Sequence[object], list[object]] = Parameter(
        "label columns of vectors; default: those of the DataFrame", objects
    )

    def __init__(
        self,
        *,
        model: N,
        feature_columns: Sequence[str],
        label_columns: Sequence[str],
        outputs: Sequence[tuple[str, Sequence[int]]] | None,
        history: Sequence[Mapping[str, float]] | None,
        run_id: str | None,
    ) -> None:
        super().__init__(feature_columns=feature_columns, label_columns=label_columns)
        self._model = self._checked(model)
        self._outputs = None if outputs is None else [(dtype, [*shape]) for dtype, shape in outputs]
        self._history, self._run_id = [dict(record) for record in history or ()], run_id or ""
        self._setDefault(output_cols=[f"{label}__output" for label in label_columns])

    @staticmethod
    @abstractmethod
    def _checked(model: N) -> N:
        """Return the model; raises `ConfigError` for an object that is no model of the framework."""

    @abstractmethod
    def _predictor(self, names: Sequence[str]) -> BatchPredictor:
        """Return a function from batches of feature columns to batches of the columns `names`."""

    def _typed_predictor(
        self, names: Sequence[str], dataset: DataFrame | pd.DataFrame
    ) -> tuple[BatchPredictor, list[str]]:
        """Return the predictor and the Spark types of its columns.

        A row of `dataset` is read only if the model does not know the shapes of its outputs."""
        predictor = self._predictor(names)
        if self._outputs is None:
            self._outputs = predictor.outputs(first_row(dataset, self.getFeatureColumns()))
        return predictor, [column_type(dtype, shape) for dtype, shape in self._outputs]

    @abstractmethod
    def _facts(self) -> dict[str, object]:
        """Return the arguments that the framework's constructor adds; JSON must hold them."""

    @abstractmethod
    def _dumped(self) -> dict[str, bytes]:
        """Return the content of the model's own files by their names."""

    def _contents(self) -> tuple[dict[str, object], dict[str, bytes]]:
        columns = {"feature_columns": self.getFeatureColumns(), "label_columns": self.getLabelColumns()}
        own = {"history": self._history, "run_id": self._run_id, "outputs": self._outputs}
        facts = {**columns, **own, **self._facts()}
        return facts, self._dumped()

    def _trained_on(self, schema: StructType) -> Self:
        """Note which label columns of `schema` hold vectors: their outputs are vectors as well. Returns itself."""
        return self._set(vector_labels=self._vectors_of(schema))

    def _vectors_of(self, schema: StructType) -> list[str]:
        labels = self.getLabelColumns()
        return [each.name for each in schema if each.name in labels and isinstance(each.dataType, VectorUDT)]

    @property
    def history(self) -> History:
        """The values of each epoch, counted from 1: "epoch", "loss", "val_loss", "seconds", "rows_per_s", ...

        A notebook shows them as curves and a table."""
        return History(dict(record) for record in self._history)

    def getParam(self, paramName: str) -> Param[Any]:
        """Return a parameter by its name; raises `ConfigError` for names without one."""
        if paramName in _NO_PARAMS:
            problem = f"is no Param of a fitted model, so that getOrDefault has no value: {_NO_PARAMS[paramName]}"
            raise ConfigError(paramName, problem)
        return super().getParam(paramName)

    def getModel(self) -> N:
        return self._model

    def setModel(self, value: N) -> Self:
        """Replace the model; the outputs of the new one may have other shapes."""
        self._model, self._outputs = self._checked(value), None
        return self

    def getRunId(self) -> str:
        return self._run_id

    def _transform(self, dataset: Any) -> Any:
        """Return a Spark DataFrame with the predictions; for rows in another form, a pandas DataFrame."""
        if not isinstance(dataset, DataFrame):
            return self._transform_without_spark(dataset)
        features = self.getFeatureColumns()
        names = self._new_columns(taken_names(dataset))
        check_columns(dataset.schema, features)
        check_names(dataset, features)
        # Names of a struct's fields; they allow fewer characters than names of columns.
        fields = [f"o{index}" for index in range(len(names))]
        predictor, types = self._typed_predictor(fields, dataset)
        noted = self.isDefined(self.vector_labels)
        vectors = self.getOrDefault(self.vector_labels) if noted else self._vectors_of(dataset.schema)
        # Spark's evaluators take double and vectors only.
        wanted = [
            "vector" if label in vectors else "double" if kind == "float" else kind
            for label, kind in zip(self.getLabelColumns(), types, strict=True)
        ]
        return add_columns(dataset, features, fields, names, types, predictor, wanted)

    def _new_columns(self, taken: Callable[[str], bool]) -> list[str]:
        """Return the names of the columns that `transform` adds, one per label; `taken` knows those that are there.

        Raises `ConfigError` for too few, too many or equal names, `DataError` for a name that a column has already."""
        names, labels = self.getOutputCols(), self.getLabelColumns()
        if len(names) != len(labels) or len(set(names)) < len(names):
            problem = f"must be a name for each label column ({', '.join(labels)}), all different, got {names}"
            raise ConfigError("output_cols", problem)
        for name in names:
            if taken(name):
                raise DataError(name, "is among the columns already; choose other names with setOutputCols")
        return names

    def _transform_without_spark(self, dataset: object) -> pd.DataFrame:
        rows = in_memory(dataset)
        frame = as_frame(rows)
        names = self._new_columns(frame.columns.__contains__)
        fields = [f"o{index}" for index in range(len(names))]
        features = features_of(rows, self.getFeatureColumns())
        predictor, _ = self._typed_predictor(fields, features)
        predicted = list(predictor(feature_batches(features, self.getFeatureColumns())))
        outputs = pd.concat(predicted, ignore_index=True) if predicted else pd.DataFrame(columns=fields)
        return frame.assign(**{name: outputs[each].to_numpy() for each, name in zip(fields, names, strict=True)})


def add_columns(
    dataset: DataFrame,
    features: Sequence[str],
    fields: Sequence[str],
    names: Sequence[str],
    types: Sequence[str],
    predictor: Callable[[Iterator[tuple[pd.Series, ...]]], Iterator[pd.DataFrame]],
    wanted: Sequence[str] | None = None,
) -> DataFrame:
    """Return the DataFrame with the predictor's `fields`, of the Spark types `types`, as further columns `names`.

    They are converted to the types `wanted`, by default left as they are; "vector" is that of pyspark.ml."""
    use_own_interpreter(dataset.sparkSession)
    schema = ", ".join(f"{field} {kind}" for field, kind in zip(fields, types, strict=True))

    def predict(batches: Iterator[tuple[pd.Series, ...]]) -> Iterator[pd.DataFrame]:
        return predictor(batches)

    udf = pandas_udf(predict, schema)  # type: ignore[call-overload]
    struct = _free_name(dataset, names)
    predicted = dataset.withColumn(struct, udf(*[numbers_without_nulls(dataset.schema, name) for name in features]))
    outputs = [
        _converted(_with_nan(F.col(struct).getField(field), kind), kind, to).alias(name)
        for field, name, kind, to in zip(fields, names, types, wanted or types, strict=True)
    ]
    return predicted.select("*", *outputs).drop(struct)


def _free_name(dataset: DataFrame, names: Sequence[str]) -> str:
    """Return a name that is neither a column's of the DataFrame nor among `names`."""
    taken, new, name = taken_names(dataset), {each.lower() for each in names}, _PREDICTED
    while taken(name) or name in new:
        name += "_"
    return name


def _with_nan(column: Column, kind: str) -> Column:
    """Return an output with NaN where the model gave NaN, of which Spark's conversion from pandas makes nulls."""
    nan = F.lit(math.nan)
    if kind in ("float", "double"):
        return F.coalesce(column, nan.cast(kind))
    if kind == "array<double>":  # that of float32 keeps NaN
        return F.transform(column, lambda item: F.coalesce(item, nan))
    return column


def _converted(column: Column, kind: str, wanted: str) -> Column:
    if wanted != "vector":
        return column if wanted == kind else column.cast(wanted)
    numbers = column if kind.startswith("array") else F.array(column)
    return array_to_vector(numbers.cast("array<double>"))


def first_row(dataset: DataFrame | pd.DataFrame, features: Sequence[str]) -> tuple[pd.Series, ...]:
    """Return the feature columns of one row without nulls as a predictor takes them; raises `DataError` without such.

    Raises `ConfigError` for a stream. Runs a Spark job unless `dataset` is a pandas DataFrame."""
    if isinstance(dataset, pd.DataFrame):
        rows = dataset[list(features)].iloc[:1].reset_index(drop=True)
    elif dataset.isStreaming:
        raise ConfigError(
            "model", "has outputs of unknown types, and a stream has no row yet: transform a DataFrame of one row first"
        )
    else:
        columns = [as_numbers(dataset.schema, name).alias(f"c{place}") for place, name in enumerate(features)]
        chosen = dataset.select(*columns)
        for name in chosen.columns:
            chosen = chosen.where(F.col(name).isNotNull())
        rows = chosen.limit(1).toPandas()
    if rows.empty:
        raise DataError(features[0], "there are no rows; the model's outputs cannot be learned from an empty DataFrame")
    return tuple(rows[name] for name in rows.columns)
