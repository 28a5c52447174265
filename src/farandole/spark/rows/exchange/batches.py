"""Spark's limit of an Arrow batch: its number of rows alone, where rows are small."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pyspark.sql import DataFrame
from pyspark.sql.types import BooleanType, DataType, DateType, NumericType, TimestampNTZType, TimestampType

from farandole.spark.jobs.application import is_stopped

_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
_UNMEASURED = str(2**31 - 1)  # the only value with which Spark does not measure
_FIXED: tuple[type[DataType], ...] = (BooleanType, NumericType, DateType, TimestampType, TimestampNTZType)
_WIDEST = 16  # bytes; the most that a value of these types takes, a decimal
_SMALL = 64 << 20  # bytes; Spark's own limit of a batch


@contextmanager
def counted_by_rows(dataframes: Sequence[DataFrame]) -> Iterator[Callable[[], None]]:
    """Keep Spark from measuring an Arrow batch after each row, where rows are so small that their number limits it.

    Spark 4.1 and later look at each buffer of each column after each row, which takes longer than all the rest of
    making the batch. Spark reads the setting while it plans a query. The yielded function restores the setting, and the
    end of the block does so at the latest. A value that the user has set stays."""
    if not dataframes or not _are_small(dataframes):
        yield lambda: None
        return
    conf = dataframes[0].sparkSession.conf  # a query of several DataFrames follows the first one's session

    def put_back() -> None:
        # Only if neither the user nor another job of the session has changed it since.
        if not is_stopped(dataframes[0].sparkSession) and conf.get(_BYTES, None) == _UNMEASURED:
            conf.unset(_BYTES)

    conf.set(_BYTES, _UNMEASURED)
    try:
        yield put_back
    finally:
        put_back()


def _are_small(dataframes: Sequence[DataFrame]) -> bool:
    conf = dataframes[0].sparkSession.conf
    rows = int(conf.get(_ROWS) or 0)
    measures = conf.isModifiable(_BYTES) and conf.get(_BYTES, None) is None
    return measures and rows > 0 and all(_row_bytes(dataframe) * rows <= _SMALL for dataframe in dataframes)


def _row_bytes(dataframe: DataFrame) -> float:
    """Return the most bytes that a row takes; infinity if a type has no fixed size."""
    kinds = [field.dataType for field in dataframe.schema.fields]
    return len(kinds) * _WIDEST if all(isinstance(kind, _FIXED) for kind in kinds) else math.inf
