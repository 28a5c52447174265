"""DataFrames that a job's call refers to, wherever they are in it, are numbered once. No Spark session is started."""

import pickle
from collections.abc import Callable
from typing import Any, cast

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import DataFrame

from farandole.errors import ConfigError, PicklingError
from farandole.launch.pickling import dump_call
from farandole.spark.rows.converter import HeldRows
from farandole.spark.rows.dataframes import feeding
from farandole.spark.rows.dataset_converter import GivenRows, SparkDatasetConverter
from farandole.spark.rows.fed_rows import FedRows


def frame() -> DataFrame:
    return cast(DataFrame, object())  # nothing is asked of it


def fed(converter: SparkDatasetConverter) -> FedRows:
    rows = converter._rows
    assert isinstance(rows, GivenRows)
    return rows._fed


def sent(call: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    found: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] = pickle.loads(call)
    return found


def test_converters_are_found_wherever_they_are() -> None:
    argument, frames = frame(), [frame() for _ in range(2)]
    train, val = (SparkDatasetConverter(HeldRows(each)) for each in frames)
    again = SparkDatasetConverter(HeldRows(frames[1]))

    def main(given: dict[str, list[SparkDatasetConverter]]) -> list[SparkDatasetConverter]:
        return [train, val, *given["more"]]

    job = [argument]  # one that was among the arguments itself
    with feeding(job):
        call = dump_call(main, ({"more": [val, again]},), {})
    assert job == [argument, *frames]
    function, args, _ = sent(call)
    assert sorted(fed(each).number for each in function(*args)) == [1, 2, 2, 2]
    # Laid out on this machine, the same ones stand for files.
    laid = [FedRows(number, (f"/{number}",)) for number in range(3)]
    with feeding(job, laid):
        function, args, _ = sent(dump_call(main, ({"more": [val, again]},), {}))
    for each in function(*args):
        assert fed(each).paths == (f"/{fed(each).number}",)
    assert len(job) == 3


def test_rows_that_stay_with_the_driver_are_sent_nowhere_else() -> None:
    converter = SparkDatasetConverter(HeldRows(frame()))
    with pytest.raises(ConfigError, match=r"HorovodRunner\.run or .*parentCacheDirUrl"):
        pickle.dumps(converter)

    def main() -> int:
        return len(converter)

    with pytest.raises(PicklingError, match=r"closure variable 'converter'.*has no files"):
        dump_call(main, (), {})
    with feeding([]):
        _, (there,), _ = sent(dump_call(print, (converter,), {}))
    with pytest.raises(ConfigError, match="those of a rank's own process"):
        len(there)


def test_what_was_deleted_is_not_sent() -> None:
    converter = SparkDatasetConverter(HeldRows(frame()))
    for _ in range(2):
        converter.delete()
    with feeding([]), pytest.raises(ConfigError, match="was deleted; make another one"):
        pickle.dumps(converter)
    with pytest.raises(ConfigError, match="was deleted; make another one"):
        len(converter)
