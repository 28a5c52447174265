"""Generator of the competition's files, of any size: `write_files(folder, rows=10_000)`.

Sales follow the weekday, promotions, seasons, holidays, weather, competitors and a level of each store, with noise.
Closed stores sell nothing. The same arguments give the same files.
"""

import math
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rossmann.calendars import STATES, WITHOUT_STORES, public_holidays, school_holidays
from rossmann.files import SCHEMAS, WEATHER

FIRST_DAY, LAST_DAY = date(2013, 1, 1), date(2015, 7, 31)  # of train.csv
TEST_DAYS = 48
FEWEST_STORES = 3
SHARE_IN_TEST = 0.77  # of the stores
UNKNOWN_OPEN = 0.0003  # share of the test's rows whose Open is missing
BLOCK = 32  # days that are generated at once, for all stores

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class World:
    """Everything that sales depend on, by day (first axis) and state (second axis)."""

    days: list[date]
    temperature: Numbers
    rain: NDArray[np.bool_]
    trend: Numbers
    holiday: NDArray[np.str_]
    school: NDArray[np.bool_]
    promo: NDArray[np.bool_]  # by day


@dataclass(frozen=True)
class Stores:
    """The stores' rows of store.csv, and the hidden properties by which their sales differ."""

    table: pd.DataFrame  # with the column State
    state: NDArray[np.int64]  # place of the state
    level: Numbers  # mean of the logarithm of sales
    weekday: Numbers  # (stores, 7), added to it
    promo: Numbers
    season: Numbers
    refurbished: NDArray[np.int64]  # (stores, 2): numbers of the first and last day of a closure; -1: none

    @property
    def open_on_sundays(self) -> NDArray[np.bool_]:
        return (self.table["StoreType"] == "b").to_numpy()


def write_files(folder: str | Path, *, rows: int = 10_000, seed: int = 7) -> None:
    """Write all files into a folder, which is created; train.csv gets about `rows` rows.

    Stores have 942 days each, as Kaggle's have; fewer than three stores have fewer days."""
    place = Path(folder)
    (place / "weather").mkdir(parents=True, exist_ok=True)
    whole = (LAST_DAY - FIRST_DAY).days + 1
    stores_count = max(FEWEST_STORES, round(rows / whole))
    length = min(whole, max(1, round(rows / stores_count)))
    first = LAST_DAY - timedelta(length - 1)
    days = [first + timedelta(number) for number in range(length + TEST_DAYS)]
    random = np.random.default_rng(seed)
    world = _world(days, random)
    stores = _stores(stores_count, length, random)
    _write(stores.table, place / "store.csv", SCHEMAS["store.csv"])
    _write(stores.table, place / "store_states.csv", SCHEMAS["store_states.csv"])
    names = {name: code for name, (code, _) in STATES.items()} | WITHOUT_STORES
    _write(pd.DataFrame(names.items(), columns=["StateName", "State"]), place / "state_names.csv")
    _write_weather(place / "weather", world, random)
    _write_trend(place / "googletrend.csv", world)
    _write_sales(place, world, stores, length, random)


def _write(table: pd.DataFrame, path: Path, schema: str | None = None, *, first: bool = True, sep: str = ",") -> None:
    names = list(table) if schema is None else [column.split()[0] for column in schema.split(", ")]
    table.to_csv(path, columns=names, index=False, header=first, mode="w" if first else "a", sep=sep)


def _world(days: list[date], random: np.random.Generator) -> World:
    count, states = len(days), len(STATES)
    year = np.array([day.timetuple().tm_yday for day in days]) / 365.25 * 2 * math.pi
    drift = np.zeros((count, states))
    steps = random.normal(0, 1.6, (count, 1)) + random.normal(0, 0.6, (count, states))
    for day in range(1, count):
        drift[day] = 0.8 * drift[day - 1] + steps[day]
    weeks = np.array([(day - timedelta((day.weekday() + 1) % 7)).toordinal() for day in days])
    _, week = np.unique(weeks, return_inverse=True)
    christmas = np.exp(-(((year / 2 / math.pi * 365.25 - 350) / 14) ** 2))
    by_week = random.normal(0, 4, (week.max() + 1, states))[week]
    # Equal within a week: the value of its first day here.
    _, start = np.unique(week, return_index=True)
    trend = (58 - 6 * np.cos(year) + 30 * christmas)[start][week][:, None] + by_week
    return World(
        days=days,
        temperature=(9.5 - 9.5 * np.cos(year - 0.35))[:, None] + drift,
        rain=random.random((count, 1)) * 0.5 + random.random((count, states)) * 0.5 < 0.45,
        trend=np.clip(np.round(trend), 0, 100),
        holiday=np.stack([public_holidays(code, days) for code, _ in STATES.values()], 1),
        school=np.stack([school_holidays(number, days) for number in range(states)], 1),
        # From Monday to Friday of every second week.
        promo=np.array([day.weekday() < 5 and day.isocalendar().week % 2 == 1 for day in days]),
    )


def _stores(count: int, length: int, random: np.random.Generator) -> Stores:
    shares = np.array([share for _, share in STATES.values()]) / sum(share for _, share in STATES.values())
    state = random.choice(len(STATES), count, p=shares)
    kind = random.choice(list("abcd"), count, p=[0.54, 0.02, 0.13, 0.31])
    distance = np.round(np.exp(random.normal(7.7, 1.3, count)), -1) + 20
    rival_known = random.random(count) < 0.68
    promo2 = random.random(count) < 0.51
    missing = np.full(count, np.nan)
    table = pd.DataFrame(
        {
            "Store": np.arange(1, count + 1),
            "StoreType": kind,
            "Assortment": random.choice(list("abc"), count, p=[0.53, 0.01, 0.46]),
            "CompetitionDistance": np.where(random.random(count) < 0.003, np.nan, distance),
            "CompetitionOpenSinceMonth": np.where(rival_known, random.integers(1, 13, count), missing),
            "CompetitionOpenSinceYear": np.where(rival_known, random.integers(2001, 2016, count), missing),
            "Promo2": promo2.astype(int),
            "Promo2SinceWeek": np.where(promo2, random.integers(1, 51, count), missing),
            "Promo2SinceYear": np.where(promo2, random.integers(2009, 2016, count), missing),
            "PromoInterval": np.where(
                promo2, random.choice(["Jan,Apr,Jul,Oct", "Feb,May,Aug,Nov", "Mar,Jun,Sept,Dec"], count), ""
            ),
            "State": np.array([code for code, _ in STATES.values()])[state],
        }
    )
    whole_numbers = [name for name in table if "Since" in name]
    table = table.astype(dict.fromkeys(whole_numbers, "Int64"))
    closed_from = random.integers(0, max(1, length - 40), count)
    closure = np.stack([closed_from, closed_from + random.integers(14, 40, count)], 1)
    weekday = np.array([0.14, 0.02, -0.03, -0.03, 0.04, -0.16, 0.12])
    return Stores(
        table=table,
        state=state,
        level=random.normal(8.65, 0.3, count) + 0.35 * (kind == "b"),
        weekday=weekday + random.normal(0, 0.05, (count, 7)),
        promo=random.normal(0.3, 0.08, count),
        season=random.normal(1.0, 0.3, count),
        refurbished=np.where(random.random(count)[:, None] < 0.15, closure, -1),
    )


def _write_weather(folder: Path, world: World, random: np.random.Generator) -> None:
    """Write one file per state. Columns without an effect on sales have plausible values."""
    names = [*STATES, *WITHOUT_STORES]
    for place, name in enumerate(names):
        state = place % len(STATES)  # states without stores get the weather of others
        mean, rain = np.round(world.temperature[:, state]), world.rain[:, state]
        count = len(mean)
        spread = random.integers(2, 8, count)
        humidity = np.clip(np.round(random.normal(72, 10, count) + 8 * rain), 20, 96)
        pressure = np.round(random.normal(1015, 8, count) - 5 * rain)
        wind = random.integers(4, 25, count)
        snow = rain & (mean < 0)
        cloud = np.where(rain, random.integers(5, 9, count), random.integers(0, 6, count)).astype(float)
        cloud[~rain & (random.random(count) < 0.15)] = np.nan
        table = pd.DataFrame({"Date": world.days})
        for title, middle, around in (
            ("{}_TemperatureC", mean, spread),
            ("{}Dew_Point", mean - 4, 2),
            ("{}_Humidity", humidity, random.integers(4, 20, count)),
            ("{}_Sea_Level_PressurehPa", pressure, 3),
            ("{}_Visibility", np.where(rain, 10, 17), 6),
        ):
            for word, values in (("Max", middle + around), ("Mean", middle), ("Min", middle - around)):
                table[title.format(word)] = np.asarray(values, int)
        table = table.rename(
            columns={
                "MaxDew_Point": "Dew_PointC", "MeanDew_Point": "MeanDew_PointC", "MinDew_Point": "Min_DewpointC",
                "Max_Visibility": "Max_VisibilityKm", "Mean_Visibility": "Mean_VisibilityKm",
                "Min_Visibility": "Min_VisibilitykM",
            }
        )  # fmt: skip
        table["Max_Humidity"] = table["Max_Humidity"].clip(upper=100)
        table["Max_Wind_SpeedKm_h"], table["Mean_Wind_SpeedKm_h"] = wind + random.integers(4, 16, count), wind
        table["Max_Gust_SpeedKm_h"] = pd.Series(np.where(wind > 18, wind * 2, np.nan)).astype("Int64")
        table["Precipitationmm"] = np.where(rain, np.round(random.gamma(1.2, 2.5, count), 2), 0.0)
        table["CloudCover"] = pd.Series(cloud).astype("Int64")
        table["Events"] = np.where(snow, "Snow", np.where(rain, "Rain", ""))
        table["WindDirDegrees"] = random.integers(0, 360, count)
        table = table.astype({"Max_Gust_SpeedKm_h": object, "CloudCover": object}).fillna("NA")
        _write(table, folder / f"{name}.csv", WEATHER, sep=";")


def _write_trend(path: Path, world: World) -> None:
    """Write each week's value for each state, and their mean for Germany. Weeks begin on Sundays.

    As in Kaggle's file, a week follows the last day of sales. Programs that join by calendar week use the trend of the
    Sunday at its end."""
    table = pd.DataFrame(world.trend, columns=[code for code, _ in STATES.values()])
    sundays = [day - timedelta((day.weekday() + 1) % 7) for day in world.days]
    table = table.groupby(pd.Index(sundays, name="first")).first()
    table.loc[table.index[-1] + timedelta(7)] = table.iloc[-1]
    table.columns = [f"Rossmann_DE_{'NI' if code == 'HB,NI' else code}" for code in table]
    table["Rossmann_DE"] = table.mean(axis=1).round()
    long = table.reset_index().melt("first", var_name="file", value_name="trend").astype({"trend": int})
    long["week"] = [f"{first} - {first + timedelta(6)}" for first in long["first"]]
    _write(long, path, SCHEMAS["googletrend.csv"])


def _write_sales(folder: Path, world: World, stores: Stores, length: int, random: np.random.Generator) -> None:
    """Write train.csv and test.csv, the newest days first, a block of days at a time."""
    in_test = random.random(len(stores.level)) < SHARE_IN_TEST
    in_test[0] = True
    last_id = 0
    for name, first, last in (("test.csv", length, len(world.days)), ("train.csv", 0, length)):
        for end in range(last, first, -BLOCK):
            days = np.arange(end - 1, max(first, end - BLOCK) - 1, -1)
            block = _block(world, stores, days, random)
            if name == "test.csv":
                block = block[np.tile(in_test, len(days))].reset_index(drop=True)
                block["Id"] = np.arange(last_id + 1, last_id + len(block) + 1)
                block["Open"] = block["Open"].astype("Int64").mask(random.random(len(block)) < UNKNOWN_OPEN)
                last_id += len(block)
            _write(block, folder / name, SCHEMAS[name], first=end == last)


def _block(world: World, stores: Stores, days: NDArray[np.int64], random: np.random.Generator) -> pd.DataFrame:
    """Return the rows of all stores on `days`, with sales and customers."""
    dates = [world.days[day] for day in days]
    weekday = np.array([each.weekday() for each in dates])
    by_state = np.ix_(days, stores.state)
    holiday = world.holiday[by_state]
    sunday = (weekday == 6)[:, None] & ~stores.open_on_sundays
    refurbished = (stores.refurbished[:, 0] <= days[:, None]) & (days[:, None] <= stores.refurbished[:, 1])
    is_open = (holiday == "0") & ~sunday & ~refurbished
    sales = np.exp(_log_sales(world, stores, days, weekday) + random.normal(0, 0.07, is_open.shape))
    sales = np.where(is_open, np.round(sales), 0).astype(int)
    basket = random.normal(8.6, 0.4, is_open.shape)
    return pd.DataFrame(
        {
            "Store": np.tile(stores.table["Store"], len(days)),
            "DayOfWeek": np.repeat(weekday + 1, len(stores.level)),
            "Date": np.repeat(np.array(dates, dtype=object), len(stores.level)),
            "Sales": sales.ravel(),
            "Customers": np.round(sales / basket).astype(int).ravel(),
            "Open": is_open.ravel().astype(int),
            "Promo": np.repeat(world.promo[days], len(stores.level)).astype(int),
            "StateHoliday": holiday.ravel(),
            "SchoolHoliday": world.school[by_state].ravel().astype(int),
        }
    )


def _log_sales(world: World, stores: Stores, days: NDArray[np.int64], weekday: NDArray[np.int64]) -> Numbers:
    """Return the expected logarithm of the sales of open stores, by day and store."""
    dates = [world.days[day] for day in days]
    of_year = np.array([each.timetuple().tm_yday for each in dates])[:, None]
    months = np.array([each.year * 12 + each.month - 1 for each in dates])[:, None]
    table, by_state = stores.table, np.ix_(days, stores.state)

    def since(year: str, month: Numbers) -> NDArray[np.bool_]:
        begun = table[year].astype(float).to_numpy() * 12 + month
        return months >= np.nan_to_num(begun, nan=np.inf)

    rival = since("CompetitionOpenSinceYear", table["CompetitionOpenSinceMonth"].astype(float).to_numpy() - 1)
    near = np.exp(-np.nan_to_num(table["CompetitionDistance"].to_numpy(), nan=1e5) / 2000)
    promo2 = since("Promo2SinceYear", table["Promo2SinceWeek"].astype(float).to_numpy() / 4.4)
    tomorrow = np.ix_(np.minimum(days + 1, len(world.days) - 1), stores.state)
    festive = 0.28 * np.exp(-(((of_year - 354) / 11) ** 2)) + 0.05 * np.cos((of_year - 330) / 365.25 * 2 * math.pi)
    promo = world.promo[days][:, None] * (stores.promo + 0.1 * (weekday == 0)[:, None])
    hot = np.maximum(0, world.temperature[by_state] - 24)
    return (
        stores.level + stores.weekday[:, weekday].T + promo + festive * stores.season
        + 0.02 * (months - 24155) / 12  # growth, from the beginning of 2013
        + 0.16 * (world.holiday[tomorrow] != "0") + 0.03 * world.school[by_state]
        - 0.15 * near * rival + 0.05 * promo2
        - 0.03 * world.rain[by_state] - 0.01 * hot + 0.002 * (world.trend[by_state] - 60)
    )  # fmt: skip
