"""Classes and probabilities from columns of model outputs, as Spark's own expressions."""

from collections.abc import Callable

from farandole.extras import importing

with importing("farandole.spark.functions"):
    from pyspark.sql import Column
    from pyspark.sql import functions as F


def argmax(column: Column | str) -> Column:
    """Return the index of the first largest number of each array, counted from 0; null for an empty array."""
    given = _column(column)
    return (F.array_position(given, F.array_max(given)) - 1).cast("int")


def softmax(column: Column | str) -> Column:
    """Return the probabilities for an array of logits, as an array of double."""
    given = _column(column)
    # The largest logit is subtracted, so that no exponential overflows.
    powers = _with(
        F.array_max(given), lambda largest: F.transform(given, lambda each: F.exp((each - largest).cast("double")))
    )

    def shares(values: Column) -> Column:
        total = F.aggregate(values, F.lit(0.0), lambda before, each: before + each)
        return _with(total, lambda whole: F.transform(values, lambda each: each / whole))

    return _with(powers, shares)


def sigmoid(column: Column | str) -> Column:
    """Return the probability for one logit, as a double."""
    return 1.0 / (1.0 + F.exp(-_column(column).cast("double")))


def _with(value: Column, use: Callable[[Column], Column]) -> Column:
    """Return `use(value)`; the value is computed once per row, not once per element of an array."""
    return F.transform(F.array(value), use)[0]


def _column(given: Column | str) -> Column:
    return F.col(given) if isinstance(given, str) else given
