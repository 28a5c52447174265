"""Number of rows that Spark puts in an Arrow batch, estimated within a bounded time."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pyspark.sql import DataFrame
from pyspark.sql.types import BooleanType, DataType, DateType, NumericType, TimestampNTZType, TimestampType

__all__ = ["counted_by_rows"]

_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
_UNMEASURED = str(2**31 - 1)  # with this value, and no other, Spark does not measure
_FIXED: tuple[type[DataType], ...] = (BooleanType, NumericType, DateType, TimestampType, TimestampNTZType)
_WIDEST = 16  # bytes that a value of these takes at most, as a decimal
_SMALL = 64 << 20  # bytes that Spark itself holds a batch to


@contextmanager
def counted_by_rows(dataframes: Sequence[DataFrame]) -> Iterator[Callable[[], None]]:
    """Keep Spark from measuring an Arrow batch after each row, where rows are so small that their number limits it.

    Spark 4.1 and later look at each buffer of each column after each row, which takes longer than all the rest of
    making the batch. It reads the setting while it plans a query, so it is put back when the function that is given is
    called, at the latest at the end. What the user has set stays."""
    if not dataframes or not _are_small(dataframes):
        yield lambda: None
        return
    conf = dataframes[0].sparkSession.conf  # whose settings a query of several follows

    def put_back() -> None:
        # Not what the user, or another job of the session, has made of it since.
        if conf.get(_BYTES, None) == _UNMEASURED:
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
    """Return the bytes that a row takes at most."""
    kinds = [field.dataType for field in dataframe.schema.fields]
    return len(kinds) * _WIDEST if all(isinstance(kind, _FIXED) for kind in kinds) else math.inf
