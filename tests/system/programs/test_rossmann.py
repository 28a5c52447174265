"""The sales example: its columns against those that pandas computes, and the whole program."""

import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers import programs
from helpers.installed import require

pytest.importorskip("pyspark")
pytest.importorskip("pandas")

import numpy as np
import pandas as pd
from pyspark.sql import SparkSession
from rossmann.features import CATEGORICAL, CONTINUOUS, LABEL, MEASURES, Encoding, engineer
from rossmann.generate import write_files
from rossmann.tables import read

pytestmark = [pytest.mark.spark, pytest.mark.native, pytest.mark.timeout(400)]

PROGRAM = Path(__file__).parents[3] / "examples" / "rossmann" / "forecast.py"
VALIDATION_DAYS = 42


@dataclass(frozen=True)
class Made:
    folder: Path
    rows: pd.DataFrame  # by Spark, ordered by store and date
    encoding: Encoding
    encoded: pd.DataFrame


@pytest.fixture(scope="module")
def made(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("rossmann")
    write_files(folder, rows=2400, seed=5)
    # States with and without trends of their own; gaps of each kind.
    (folder / "store_states.csv").write_text('Store,State\n1,"HB,NI"\n2,BY\n3,SN\n')
    stores = pd.read_csv(folder / "store.csv")
    stores["CompetitionDistance"] = [500.0, np.nan, 2000.0]
    stores["CompetitionOpenSinceMonth"] = pd.array([3, pd.NA, 1], "Int64")
    stores["CompetitionOpenSinceYear"] = pd.array([2014, pd.NA, 1900], "Int64")
    stores["Promo2SinceWeek"] = pd.array([pd.NA, 14, 5], "Int64")
    stores["Promo2SinceYear"] = pd.array([pd.NA, 2015, 2012], "Int64")
    stores.to_csv(folder / "store.csv", index=False)
    rows = engineer(read(spark, folder.as_uri()), validation_days=VALIDATION_DAYS).cache()
    encoding = Encoding.fit(rows)
    by_day = rows.orderBy("Store", "Date").toPandas()
    encoded = encoding.apply(rows).orderBy("Store", "Date").toPandas()
    rows.unpersist()
    return Made(folder, by_day, encoding, encoded)


@pytest.fixture(scope="module")
def expected(made: Made) -> Iterator[pd.DataFrame]:
    """Yield all rows with the engineered columns, computed row by row without Spark."""
    train, test = (pd.read_csv(made.folder / name, dtype={"StateHoliday": str}) for name in ("train.csv", "test.csv"))
    rows = pd.concat([train, test], ignore_index=True)
    rows["Date"] = pd.to_datetime(rows["Date"])
    rows = rows.sort_values(["Store", "Date"]).reset_index(drop=True)
    events = {
        "StateHoliday": rows["StateHoliday"] != "0", "SchoolHoliday": rows["SchoolHoliday"] == 1,
        "Promo": rows["Promo"] == 1,
    }  # fmt: skip
    for name, happens in events.items():
        when = rows["Date"].where(happens)
        since = (rows["Date"] - when.groupby(rows["Store"]).ffill()).dt.days
        until = (when.groupby(rows["Store"]).bfill() - rows["Date"]).dt.days
        rows[f"Backward{name}"] = since.fillna(60).clip(upper=60)
        rows[f"Forward{name}"] = until.fillna(60).clip(upper=60)
    rows = rows[rows["Id"].notna() | (rows["Sales"] > 0)]
    rows = rows.merge(pd.read_csv(made.folder / "store.csv"), on="Store")
    rows = rows.merge(pd.read_csv(made.folder / "store_states.csv"), on="Store")
    yield rows.sort_values(["Store", "Date"]).reset_index(drop=True)


def test_rows_are_open_days_and_the_whole_test(made: Made, expected: pd.DataFrame) -> None:
    assert list(made.rows["Store"]) == list(expected["Store"])
    assert list(pd.to_datetime(made.rows["Date"])) == list(expected["Date"])
    np.testing.assert_allclose(made.rows[LABEL], np.log(expected["Sales"]))
    train = made.rows["Id"].isna()
    late = pd.to_datetime(made.rows["Date"]) > pd.Timestamp("2015-07-31") - pd.Timedelta(days=VALIDATION_DAYS)
    assert list(made.rows["Validation"][train]) == list(late[train])
    assert made.rows["Validation"][~train].isna().all()


def test_days_to_events(made: Made, expected: pd.DataFrame) -> None:
    for name in ("StateHoliday", "SchoolHoliday", "Promo"):
        for way in ("Backward", "Forward"):
            assert list(made.rows[way + name]) == list(expected[way + name]), way + name
    assert made.rows["BackwardPromo"].max() > 2


def test_parts_of_dates_and_durations(made: Made, expected: pd.DataFrame) -> None:
    dates = expected["Date"].dt
    parts = {"Year": dates.year, "Month": dates.month, "Day": dates.day, "Week": dates.isocalendar().week}
    for name, want in parts.items():
        assert list(made.rows[name]) == list(want), name

    def months(row: "pd.Series[object]") -> int:
        if row["Store"] != 1:  # unknown, and in 1900
            return 0
        return min(24, max(0, (row["Date"] - pd.Timestamp("2014-03-15")).days // 30))

    def weeks(row: "pd.Series[object]") -> int:
        if math.isnan(row["Promo2SinceYear"]):
            return 0
        begun = pd.Timestamp.fromisocalendar(int(row["Promo2SinceYear"]), int(row["Promo2SinceWeek"]), 1)
        return min(25, max(0, (row["Date"] - begun).days // 7))

    assert list(made.rows["CompetitionMonthsOpen"]) == list(expected.apply(months, axis=1))
    assert list(made.rows["Promo2Weeks"]) == list(expected.apply(weeks, axis=1))
    assert set(made.rows["Promo2Weeks"]) > {0, 1, 25}
    assert set(made.rows["CompetitionOpenSinceYear"]) == {0, 1900, 2014}


def test_weather_and_trends_of_the_state(made: Made, expected: pd.DataFrame) -> None:
    names = {"HB,NI": "Niedersachsen", "BY": "Bayern", "SN": "Sachsen"}
    weather = {
        code: pd.read_csv(made.folder / "weather" / f"{name}.csv", sep=";", index_col="Date")
        for code, name in names.items()
    }
    trend = pd.read_csv(made.folder / "googletrend.csv")
    trend["first"] = trend["week"].str[:10]
    values = trend.set_index(["file", "first"])["trend"]
    days = expected["Date"].dt.strftime("%Y-%m-%d")
    sundays = (expected["Date"] - pd.to_timedelta((expected["Date"].dt.weekday + 1) % 7, "D")).dt.strftime("%Y-%m-%d")
    for name in ("Mean_TemperatureC", "Max_Humidity", "CloudCover"):
        want = [weather[code].loc[day, name] for code, day in zip(expected["State"], days, strict=True)]
        np.testing.assert_array_equal(made.rows[name], want)
    assert made.rows["CloudCover"].isna().any()
    events = [weather[code].loc[day, "Events"] for code, day in zip(expected["State"], days, strict=True)]
    assert list(made.rows["Events"]) == ["none" if isinstance(each, float) else each for each in events]
    files = expected["State"].map({"HB,NI": "Rossmann_DE_NI", "BY": "Rossmann_DE_BY", "SN": "Rossmann_DE_SN"})
    assert list(made.rows["trend"]) == [values[place] for place in zip(files, sundays, strict=True)]
    assert list(made.rows["trend_de"]) == [values["Rossmann_DE", day] for day in sundays]


def test_the_encoding_knows_the_training_rows_alone(made: Made) -> None:
    training = (made.rows["Validation"] == False).to_numpy()  # noqa: E712  the test's are None
    assert 0 < training.sum() < len(training)
    for name in CATEGORICAL:
        words = made.encoding.vocabularies[name]
        raw = made.rows[name].astype(str)
        assert sorted(words) == sorted(set(raw[training])), name
        codes = [words.index(each) + 1 if each in words else 0 for each in raw]
        assert list(made.encoded[f"{name}_code"]) == codes, name
    assert (made.encoded["DayOfWeek_code"] == 0).any(), "Sundays, on which all of these stores are closed in training"
    raw = made.rows[CONTINUOUS].astype(float)
    scaled = (raw - raw[training].mean()) / raw[training].std(ddof=0).replace(0, 1)
    np.testing.assert_allclose(np.stack(made.encoded[MEASURES]), scaled.fillna(0), rtol=1e-4, atol=1e-5)
    mean, deviation = made.encoding.scales[LABEL]
    assert mean == pytest.approx(made.rows[LABEL][training].mean())
    assert deviation == pytest.approx(made.rows[LABEL][training].std(ddof=0))


WAYS = ["estimator", "runner"] if os.environ.get("FARANDOLE_TEST_WAYS") == "both" else ["estimator"]


@pytest.mark.parametrize("way", WAYS)  # each takes fifty seconds of a core
def test_the_program_forecasts(tmp_path: Path, way: str) -> None:
    require("keras", "tensorflow", "matplotlib")
    command = [sys.executable, str(PROGRAM), "--folder", str(tmp_path), "--rows", "3000", "--epochs", "3"]
    command += ["--way", way]
    environment = {**os.environ, **programs.warm_spark("tensorflow"), "FARANDOLE_START_TIMEOUT": "120"}
    done = programs.run(command, framework="tensorflow", cwd=tmp_path, timeout=380, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    errors = re.findall(r"^([\w ]+?) +(\d\.\d{4})$", done.stdout, re.MULTILINE)
    said = {name: float(error) for name, error in errors}
    simple = min(said.pop("mean of all"), said.pop("mean of store and weekday"))
    assert set(said) == {way}
    assert all(error < simple for error in said.values()), done.stdout
    test = pd.read_csv(tmp_path / "test.csv")
    for way in said:
        out = tmp_path / "out" / way
        submitted = pd.read_csv(out / "submission.csv")
        assert list(submitted) == ["Id", "Sales"]
        assert list(submitted["Id"]) == sorted(test["Id"])
        closed = test.sort_values("Id")["Open"].to_numpy() == 0
        assert closed.any()
        assert (submitted["Sales"][closed] == 0).all() and (submitted["Sales"][~closed] > 100).all()
        for picture in ("history.png", "predictions.png"):
            assert (out / picture).read_bytes().startswith(b"\x89PNG")
        assert (out / "model.keras").stat().st_size > 0
    if way == "estimator":
        assert list((tmp_path / "out" / "store" / "runs").glob("*/best.keras"))
