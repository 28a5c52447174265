"""German calendars for generated sales: states, public holidays and school holidays."""

from datetime import date, timedelta

import numpy as np
from dateutil.easter import easter
from numpy.typing import NDArray

# By the name of the weather file: the state's code, and its share of the stores in percent.
STATES = {
    "BadenWuerttemberg": ("BW", 7), "Bayern": ("BY", 16), "Berlin": ("BE", 8), "Hamburg": ("HH", 3),
    "Hessen": ("HE", 10), "Niedersachsen": ("HB,NI", 5), "NordrheinWestfalen": ("NW", 26), "RheinlandPfalz": ("RP", 4),
    "Saarland": ("SL", 1), "Sachsen": ("SN", 7), "SachsenAnhalt": ("ST", 5), "SchleswigHolstein": ("SH", 5),
    "Thueringen": ("TH", 3),
}  # fmt: skip
# States with weather and a name, but no store; Bremen's stores count for Lower Saxony.
WITHOUT_STORES = {"Brandenburg": "BB", "Bremen": "HB", "MecklenburgVorpommern": "MV"}

_FIXED = [(1, 1, "a"), (5, 1, "a"), (10, 3, "a"), (12, 25, "c"), (12, 26, "c")]  # month, day, kind
_MOVING = [(-2, "b"), (1, "b"), (39, "a"), (50, "a")]  # days after Easter Sunday
_OF_STATES = [
    (1, 6, ("BW", "BY", "ST")),
    (10, 31, ("SN", "ST", "TH")),
    (11, 1, ("BW", "BY", "NW", "RP", "SL")),
]
_CORPUS_CHRISTI = (60, ("BW", "BY", "HE", "NW", "RP", "SL"))


def public_holidays(state: str, days: list[date]) -> NDArray[np.str_]:
    """Return each day's kind in a state: "a" public holiday, "b" Easter, "c" Christmas, "0" none."""
    kinds: dict[date, str] = {}
    for year in {day.year for day in days}:
        kinds |= {date(year, month, day): kind for month, day, kind in _FIXED}
        kinds |= {easter(year) + timedelta(after): kind for after, kind in _MOVING}
        kinds |= {date(year, month, day): "a" for month, day, states in _OF_STATES if state in states}
        if state in _CORPUS_CHRISTI[1]:
            kinds[easter(year) + timedelta(_CORPUS_CHRISTI[0])] = "a"
    return np.array([kinds.get(day, "0") for day in days])


def school_holidays(place: int, days: list[date]) -> NDArray[np.bool_]:
    """Return which days are working days in school holidays, for the state at `place` of the list.

    Summer and autumn holidays differ between states."""
    free: set[date] = set()
    for year in {day.year for day in days}:
        summer = date(year, 6, 24) + timedelta(7 * (place % 6))
        autumn = date(year, 10, 4) + timedelta(7 * (place % 3))
        spring = easter(year) - timedelta(12)
        for first, length in [
            (date(year, 1, 1), 5),
            (spring, 17),
            (summer, 42),
            (autumn, 12),
            (date(year, 12, 22), 10),
        ]:
            free |= {first + timedelta(day) for day in range(length)}
    return np.array([day in free and day.weekday() < 5 for day in days])
