"""The generator of the sales example, and its measure of errors."""

import hashlib
import math
from datetime import date
from pathlib import Path

import pytest

pytest.importorskip("pandas")

import numpy as np
import pandas as pd
from rossmann.calendars import public_holidays, school_holidays
from rossmann.files import SCHEMAS, WEATHER
from rossmann.generate import write_files

from helpers.installed import require


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with files of 5 stores."""
    made = tmp_path_factory.mktemp("rossmann")
    write_files(made, rows=4710, seed=3)
    return made


def columns_of(schema: str) -> list[str]:
    return [each.split()[0] for each in schema.split(", ")]


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_each_file_has_kaggles_columns(folder: Path) -> None:
    for name, schema in SCHEMAS.items():
        assert list(pd.read_csv(folder / name, nrows=1)) == columns_of(schema), name
    states = pd.read_csv(folder / "state_names.csv")["StateName"]
    assert len(states) == 16
    assert sorted(path.stem for path in (folder / "weather").iterdir()) == sorted(states)
    for path in (folder / "weather").iterdir():
        assert list(pd.read_csv(path, sep=";", nrows=1)) == columns_of(WEATHER)


def test_the_trends_of_each_calendar_week_end_on_its_sunday(folder: Path) -> None:
    """Horovod's program joins the trends by the calendar week of their first day, a Sunday."""
    train, test = (pd.read_csv(folder / name, low_memory=False) for name in ("train.csv", "test.csv"))
    days = pd.to_datetime(pd.concat([train["Date"], test["Date"]]).drop_duplicates())
    weeks = pd.to_datetime(pd.read_csv(folder / "googletrend.csv")["week"].str[:10])
    needed, given = (set(zip(each.dt.year, each.dt.isocalendar().week, strict=True)) for each in (days, weeks))
    assert needed <= given


def test_size_and_dates(folder: Path, tmp_path: Path) -> None:
    train, test = (pd.read_csv(folder / name, low_memory=False) for name in ("train.csv", "test.csv"))
    assert len(train) == 5 * 942
    assert (train["Date"].iloc[-1], train["Date"].iloc[0]) == ("2013-01-01", "2015-07-31")
    assert train["Date"].is_monotonic_decreasing
    assert (test["Date"].min(), test["Date"].max()) == ("2015-08-01", "2015-09-17")
    assert list(test["Id"]) == list(range(1, len(test) + 1))
    assert set(test["Store"]) <= set(train["Store"])
    write_files(tmp_path, rows=600)
    assert len(pd.read_csv(tmp_path / "train.csv")) == 600
    assert pd.read_csv(tmp_path / "train.csv")["Store"].nunique() == 3


def test_a_seed_gives_the_same_files(folder: Path, tmp_path: Path) -> None:
    write_files(tmp_path / "same", rows=4710, seed=3)
    write_files(tmp_path / "other", rows=4710, seed=4)
    assert digests(tmp_path / "same") == digests(folder)
    assert digests(tmp_path / "other")["train.csv"] != digests(folder)["train.csv"]


def test_sales_follow_their_causes(folder: Path) -> None:
    train = pd.read_csv(folder / "train.csv", dtype={"StateHoliday": str}, parse_dates=["Date"])
    closed = train["Open"] == 0
    assert (train.loc[closed, ["Sales", "Customers"]] == 0).all(axis=None)
    assert (train.loc[~closed, "Sales"] > 0).all()
    stores = pd.read_csv(folder / "store.csv").set_index("Store")
    sundays = train[(train["DayOfWeek"] == 7) & ~closed]["Store"]
    assert (stores.loc[sundays.unique(), "StoreType"] == "b").all()
    assert closed[train["StateHoliday"] != "0"].all()
    assert {"0", "a", "b", "c"} == set(train["StateHoliday"])
    sold = train[~closed].assign(log=lambda rows: np.log(rows["Sales"]))
    means = sold[sold["DayOfWeek"] < 6].groupby("Promo")["log"].mean()
    assert 0.2 < means[1] - means[0] < 0.5
    december = sold[sold["Date"].dt.month == 12]["log"].mean()
    assert december > sold["log"].mean() + 0.05
    assert sold.groupby("Store")["log"].mean().std() > 0.1


def test_holidays() -> None:
    days = [date(2014, 4, 18), date(2014, 4, 21), date(2014, 12, 25), date(2014, 10, 3), date(2014, 10, 2)]
    assert list(public_holidays("BE", days)) == ["b", "b", "c", "a", "0"]
    epiphany = [date(2014, 1, 6)]
    assert (public_holidays("BY", epiphany)[0], public_holidays("BE", epiphany)[0]) == ("a", "0")
    summer = [date(2014, 7, 9), date(2014, 7, 12), date(2014, 11, 20)]  # a Wednesday, a Saturday, a school day
    assert list(school_holidays(0, summer)) == [True, False, False]


def test_rmspe_of_sales_leaves_closed_days_out() -> None:
    require("pyspark", "matplotlib")
    from rossmann.report import rmspe

    assert rmspe([100, 200, 0], [110, 180, 50]) == pytest.approx(0.1)
    assert rmspe([100, 200], [120, 200]) == pytest.approx(math.sqrt(0.04 / 2))


@pytest.mark.usefixtures("frameworks")
def test_the_metric_of_logarithms_equals_that_of_sales() -> None:
    require("pyspark", "keras", "tensorflow", "matplotlib")
    from rossmann.model import RMSPE
    from rossmann.report import rmspe

    sales, guess = np.array([[100.0], [250.0], [400.0]]), np.array([[90.0], [300.0], [400.0]])
    metric = RMSPE()
    for rows in (slice(0, 2), slice(2, 3)):
        metric.update_state(np.log(sales[rows]), np.log(guess[rows]))
    assert float(metric.result()) == pytest.approx(rmspe(sales, guess), rel=1e-5)
    metric.reset_state()
    metric.update_state(np.log(sales), np.log(guess), sample_weight=np.array([1.0, 1.0, 0.0]))
    assert float(metric.result()) == pytest.approx(rmspe(sales[:2], guess[:2]), rel=1e-5)
