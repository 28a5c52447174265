"""Columns for the network, engineered in Spark from the competition's files.

    rows = engineer(tables, validation_days=42).cache()
    encoding = Encoding.fit(rows)
    encoded = encoding.apply(rows)

`engineer` joins the files and adds dates, durations and distances to events. `Encoding` holds what is computed from the
training rows alone: vocabularies, means and deviations.
"""

from dataclasses import dataclass
from typing import Self

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from rossmann.tables import Tables

CATEGORICAL = [
    "Store", "State", "DayOfWeek", "Year", "Month", "Day", "Week", "CompetitionMonthsOpen", "Promo2Weeks", "StoreType",
    "Assortment", "PromoInterval", "CompetitionOpenSinceYear", "Promo2SinceYear", "Events", "Promo", "StateHoliday",
    "SchoolHoliday",
]  # fmt: skip
CONTINUOUS = [
    "CompetitionDistance", "Max_TemperatureC", "Mean_TemperatureC", "Min_TemperatureC", "Max_Humidity", "Mean_Humidity",
    "Min_Humidity", "Max_Wind_SpeedKm_h", "Mean_Wind_SpeedKm_h", "CloudCover", "trend", "trend_de",
    "BackwardStateHoliday", "ForwardStateHoliday", "BackwardSchoolHoliday", "ForwardSchoolHoliday", "BackwardPromo",
    "ForwardPromo",
]  # fmt: skip
CODES = [f"{name}_code" for name in CATEGORICAL]  # integers from 0, one column for each of CATEGORICAL
MEASURES = "measures"  # one array of all of CONTINUOUS, with mean 0 and deviation 1
LABEL = "log_sales"

MOST_MONTHS, MOST_WEEKS, MOST_DAYS = 24, 25, 60  # longer durations count as these
OLDEST_COMPETITION = 1990  # of earlier years, which are typing errors, the duration is unknown
_DAYS_OF_MONTH = 30


def engineer(tables: Tables, *, validation_days: int) -> DataFrame:
    """Return the rows of train.csv with sales, and all of test.csv, with the columns CATEGORICAL and CONTINUOUS.

    Rows of train.csv also have LABEL, and Validation, which is true on the last `validation_days` days. Rows of
    test.csv have an Id. Runs one job, which finds the last day."""
    last = tables.train.agg(F.max("Date")).first()[0]
    train = tables.train.drop("Customers").withColumn(
        "Validation", F.col("Date") > F.date_sub(F.lit(last), validation_days)
    )
    rows = train.unionByName(tables.test, allowMissingColumns=True)
    rows = rows.withColumn("Open", F.coalesce("Open", F.lit(1)))
    # Distances to events need closed days too, so closed days are dropped afterwards.
    rows = _with_distances(rows).where("Id IS NOT NULL OR Sales > 0")
    return _with_durations(_joined(rows, tables)).withColumn(LABEL, F.log("Sales"))


def _with_distances(rows: DataFrame) -> DataFrame:
    """Add, for each kind of event, days since the last one and until the next one in the same store."""
    events = {
        "StateHoliday": F.col("StateHoliday") != "0",
        "SchoolHoliday": F.col("SchoolHoliday") == 1,
        "Promo": F.col("Promo") == 1,
    }
    by_date = Window.partitionBy("Store").orderBy("Date")
    past = by_date.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    future = by_date.rowsBetween(Window.currentRow, Window.unboundedFollowing)
    distances = {}
    for name, happens in events.items():
        when = F.when(happens, F.col("Date"))
        since = F.date_diff(F.col("Date"), F.last(when, ignorenulls=True).over(past))
        until = F.date_diff(F.first(when, ignorenulls=True).over(future), F.col("Date"))
        distances[f"Backward{name}"], distances[f"Forward{name}"] = _capped(since), _capped(until)
    return rows.withColumns(distances)


def _capped(days: Column) -> Column:
    return F.least(F.coalesce(days, F.lit(MOST_DAYS)), F.lit(MOST_DAYS)).cast("double")


def _joined(rows: DataFrame, tables: Tables) -> DataFrame:
    """Add the columns of stores, the weather of the store's state, and the search trends of state and country."""
    # Weeks of the trends begin on Sundays.
    week = F.date_sub(F.col("Date"), F.dayofweek("Date") - 1)
    country = tables.trend.where("State IS NULL").select("Week", F.col("trend").alias("trend_de"))
    trend = tables.trend.where("State IS NOT NULL")
    return (
        rows.join(F.broadcast(tables.stores), "Store", "left")
        .join(F.broadcast(tables.weather), ["State", "Date"], "left")
        .withColumn("Week", week)
        .join(F.broadcast(trend), ["State", "Week"], "left")
        .join(F.broadcast(country), "Week", "left")
    )


def _with_durations(rows: DataFrame) -> DataFrame:
    """Add the parts of the date, and how long the competitor and the second promotion have been there.

    0 means that the beginning is unknown or in the future."""
    known = F.col("CompetitionOpenSinceYear") >= OLDEST_COMPETITION
    opened = F.make_date("CompetitionOpenSinceYear", "CompetitionOpenSinceMonth", F.lit(15))
    months = F.floor(F.date_diff(F.col("Date"), F.when(known, opened)) / _DAYS_OF_MONTH)
    # January 4 is always in week 1, and weeks begin on Mondays.
    first_monday = F.trunc(F.make_date("Promo2SinceYear", F.lit(1), F.lit(4)), "week")
    begun = F.date_add(first_monday, (F.col("Promo2SinceWeek") - 1) * 7)
    weeks = F.floor(F.date_diff(F.col("Date"), begun) / 7)
    return rows.withColumns(
        {
            "Year": F.year("Date"),
            "Month": F.month("Date"),
            "Day": F.dayofmonth("Date"),
            "Week": F.weekofyear("Date"),
            "CompetitionMonthsOpen": _between(months, MOST_MONTHS),
            "Promo2Weeks": _between(weeks, MOST_WEEKS),
            "CompetitionOpenSinceYear": F.coalesce("CompetitionOpenSinceYear", F.lit(0)),
            "Promo2SinceYear": F.coalesce("Promo2SinceYear", F.lit(0)),
            "PromoInterval": F.coalesce("PromoInterval", F.lit("none")),
            "Events": F.coalesce("Events", F.lit("none")),
        }
    )


def _between(duration: Column, most: int) -> Column:
    return F.greatest(F.lit(0), F.least(F.lit(most), F.coalesce(duration, F.lit(0)))).cast("int")


@dataclass(frozen=True)
class Encoding:
    """Numbers for categories, and scales of measures and of the label, all of them from the training rows.

    The categories of a column are texts; their codes are their places, counted from 1. Other texts have the code 0.
    Scales are means and standard deviations."""

    vocabularies: dict[str, list[str]]  # by the columns CATEGORICAL
    scales: dict[str, tuple[float, float]]  # by the columns CONTINUOUS, and LABEL

    @classmethod
    def fit(cls, rows: DataFrame) -> Self:
        """Compute the encoding from the training rows, without those of validation and test; runs one job."""
        measured = [*CONTINUOUS, LABEL]
        categories = [F.sort_array(F.collect_set(name)).cast("array<string>") for name in CATEGORICAL]
        means, deviations = [F.mean(name) for name in measured], [F.stddev_pop(name) for name in measured]
        found = list(rows.where("NOT Validation").agg(*categories, *means, *deviations).first())
        words, numbers = found[: len(categories)], found[len(categories) :]
        scales = zip(numbers[: len(measured)], numbers[len(measured) :], strict=True)
        return cls(
            dict(zip(CATEGORICAL, words, strict=True)),
            # A column without numbers, or with one only, becomes 0.
            {name: (mean or 0.0, deviation or 1.0) for name, (mean, deviation) in zip(measured, scales, strict=True)},
        )

    @property
    def cardinalities(self) -> list[int]:
        """Return the number of codes of each column, in CATEGORICAL's order."""
        return [len(self.vocabularies[name]) + 1 for name in CATEGORICAL]

    def apply(self, rows: DataFrame) -> DataFrame:
        """Return rows with CODES and MEASURES, beside LABEL and the columns that identify a row.

        A missing measure gets the mean."""
        kept = ["Id", "Store", "Date", "DayOfWeek", "Open", "Sales", "Validation"]
        return rows.select(
            *kept,
            F.col(LABEL).cast("float").alias(LABEL),
            *(self._code(name).alias(code) for name, code in zip(CATEGORICAL, CODES, strict=True)),
            F.array(*(self._scaled(name) for name in CONTINUOUS)).alias(MEASURES),
        )

    def _code(self, name: str) -> Column:
        # In Spark 4.3 a StringIndexerModel of several columns gives unknown categories the code of another column.
        place = F.array_position(F.lit(self.vocabularies[name]), F.col(name).cast("string"))
        return F.coalesce(place, F.lit(0)).cast("int")

    def _scaled(self, name: str) -> Column:
        mean, deviation = self.scales[name]
        return F.coalesce((F.col(name) - mean) / deviation, F.lit(0.0)).cast("float")
