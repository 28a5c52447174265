"""Names of a DataFrame's columns as Spark compares them: without case, unless spark.sql.caseSensitive is set."""

from collections.abc import Callable, Iterable

from pyspark.sql import DataFrame

from farandole.errors import DataError


def check_names(rows: DataFrame, names: Iterable[str]) -> None:
    """Raise `DataError` for a name under which Spark finds several columns."""
    form = _compared(rows)
    columns: dict[str, list[str]] = {}
    for each in rows.columns:
        columns.setdefault(form(each), []).append(each)
    for name in names:
        found = columns.get(form(name), [])
        if len(found) > 1:
            which = " and ".join(found)
            raise DataError(name, f"is the name of several columns for Spark ({which}); give each its own")


def taken_names(rows: DataFrame) -> Callable[[str], bool]:
    """Return a function that tells whether Spark finds a column under a name."""
    form = _compared(rows)
    columns = {form(each) for each in rows.columns}
    return lambda name: form(name) in columns


def _compared(rows: DataFrame) -> Callable[[str], str]:
    """Return the function that gives equal texts for names that are equal for Spark."""
    # A setting's text may be written in any case itself.
    is_sensitive = str(rows.sparkSession.conf.get("spark.sql.caseSensitive")).lower() == "true"
    return str if is_sensitive else str.lower
