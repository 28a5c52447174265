"""Kinds of settings (durations, sizes, choices, ...), and the description of one setting."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Protocol, TypeAlias, TypeVar, cast

from farandole.errors import ConfigError

T = TypeVar("T")
Value: TypeAlias = int | float | bool | str | timedelta | None

LONGEST = timedelta(days=365)
MOST_DIGITS = 20  # of a number

_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(us|ms|s|m|min|h|)\s*")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_NUMBER = re.compile(r"\s*([0-9]+)\s*([KMG]I?B|B|)\s*", re.IGNORECASE)
_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


class Kind(Protocol):
    """A kind of values: how they are written, read, checked and shown."""

    name: str

    @property
    def written(self) -> str:
        """How a value is written, for the reference."""
        ...

    def parse(self, text: str, source: str) -> Value:
        """Read a value; raises `ConfigError` naming `source`, which is a setting, a variable or an option."""
        ...

    def check(self, name: str, value: object) -> None:
        """Raise `ConfigError` if `value` cannot be that of the setting `name`."""
        ...

    def take(self, name: str, given: Value) -> Value:
        """Return the value of an argument; a text is read."""
        return self.parse(given, name) if isinstance(given, str) else given

    def spell(self, value: Value) -> str:
        """Return the text of `value` for `parse`."""
        return "" if value is None else str(value)

    def show(self, value: Value) -> str:
        """Return the text of `value` for people."""
        return "none" if value is None else str(value)


class Text(Kind):
    """Any text that a variable can hold, or None."""

    name, written = "text", "any text"

    def parse(self, text: str, source: str) -> str:
        return text

    def check(self, name: str, value: object) -> None:
        if value is not None and (not isinstance(value, str) or not value or "\0" in value):
            raise ConfigError(name, f"must be a non-empty text or None, got {value!r}")


class Flag(Kind):
    """True or False."""

    name, written = "flag", "1, true, yes or on; 0, false, no or off"
    _yes, _no = ("1", "true", "yes", "on"), ("0", "false", "no", "off")

    def parse(self, text: str, source: str) -> bool:
        word = text.strip().lower()
        if word not in self._yes + self._no:
            yes, no = ", ".join(self._yes), ", ".join(self._no)
            raise ConfigError(source, f"{text!r} is neither yes ({yes}) nor no ({no})")
        return word in self._yes

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, bool):
            raise ConfigError(name, f"must be True or False, got {value!r}")

    def spell(self, value: Value) -> str:
        return "1" if value else "0"

    def show(self, value: Value) -> str:
        return "yes" if value else "no"


class Choice(Kind):
    """One of some words; `others` are further words for them."""

    def __init__(self, name: str, values: Sequence[str], others: Mapping[str, str] | None = None) -> None:
        self.name, self._values, self._others = name, values, others or {}

    @property
    def written(self) -> str:
        return f"{', '.join(self._values[:-1])} or {self._values[-1]}"

    def parse(self, text: str, source: str) -> str:
        word = text.strip().lower()
        word = self._others.get(word, word)
        return self._known(source, word, text)

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, str):
            raise ConfigError(name, f"must be a text, got {value!r}")
        self._known(name, value, value)

    def _known(self, source: str, word: str, text: str) -> str:
        if word not in self._values:
            raise ConfigError(source, f"unknown {self.name} {text!r}; use one of {', '.join(self._values)}")
        return word


class Duration(Kind):
    """A time from 0 on, or above 0 if it is `positive`."""

    name, written = "duration", "seconds, or a number with us, ms, s, m or h"

    def __init__(self, *, positive: bool = False) -> None:
        self._positive = positive

    def parse(self, text: str, source: str) -> timedelta:
        match = _DURATION.fullmatch(text.strip().lower())
        if match is None:
            raise ConfigError(source, f"{text!r} is no duration; write seconds, or a number with us, ms, s, m or h")
        return _seconds(float(match[1]) * _SECONDS[match[2]], source)

    def take(self, name: str, given: Value) -> Value:
        if isinstance(given, (int, float)) and not isinstance(given, bool):
            return _seconds(given, name)
        return super().take(name, given)

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, timedelta):
            raise ConfigError(name, f"must be a timedelta, got {value!r}")
        if value < timedelta(0) or (self._positive and not value):
            least = "> 0" if self._positive else ">= 0"
            raise ConfigError(name, f"must be {least}, got {value.total_seconds():g} s")
        if value > LONGEST:
            raise ConfigError(name, f"must be at most {LONGEST.days} days, got {value.total_seconds():g} s")

    def spell(self, value: Value) -> str:
        assert isinstance(value, timedelta)
        return f"{value // timedelta(microseconds=1)}us"

    def show(self, value: Value) -> str:
        assert isinstance(value, timedelta)
        seconds = value.total_seconds()
        return f"{seconds:g} s" if seconds >= 1 or not seconds else f"{seconds * 1e6:g} us"


class Count(Kind):
    """A whole number from `least` to `largest`. Larger numbers exceed all machines, and overflow in native code."""

    name, written = "count", "a whole number"

    def __init__(self, *, least: int = 0, largest: int = (1 << 31) - 1) -> None:
        self._least, self._largest = least, largest

    def parse(self, text: str, source: str) -> int:
        match = _NUMBER.fullmatch(text.strip().lower())
        if match is None or (match[2] and not isinstance(self, Size)):
            units = ", alone or with KB, MB, GB, KiB, MiB or GiB" if isinstance(self, Size) else ""
            raise ConfigError(source, f"{text!r} is no {self.name}; write a whole number >= 0{units}")
        if len(match[1]) > MOST_DIGITS:
            problem = f"{text[:MOST_DIGITS]!r}... has {len(match[1])} digits, more than any setting can have"
            raise ConfigError(source, problem)
        return int(match[1]) * _BYTES[match[2]]

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(name, f"must be a whole number, got {value!r}")
        if value < self._least:
            raise ConfigError(name, f"must be >= {self._least}, got {value}")
        if value > self._largest:
            raise ConfigError(name, f"must be at most {self._largest}, got {value}")


class Size(Count):
    """A number of bytes, from `least` to `largest`, and a multiple of `unit`."""

    name, written = "bytes", "a whole number, alone or with KB, MB, GB, KiB, MiB or GiB"

    def __init__(self, *, least: int = 0, largest: int = 1 << 40, unit: int = 1) -> None:
        super().__init__(least=least, largest=largest)
        self._unit = unit

    def check(self, name: str, value: object) -> None:
        if self._unit > 1 and isinstance(value, int) and (value < self._least or value % self._unit):
            raise ConfigError(name, f"must be at least {self._least} and a multiple of {self._unit}, got {value}")
        super().check(name, value)

    def show(self, value: Value) -> str:
        assert isinstance(value, int)
        for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if value >= scale and value % scale == 0:
                return f"{value // scale} {unit}"
        return str(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One field of `Config` as the command line, the Spark parameters and the reference show it."""

    name: str
    topic: str  # groups settings in the reference
    kind: Kind
    default: Value
    help: str
    variables: tuple[str, ...]  # environment variables in order of precedence

    def parse(self, text: str, source: str | None = None) -> Value:
        """Parse `text` like an environment variable; raises `ConfigError` naming `source`."""
        return self.kind.parse(text, source or self.name)

    def read(self, env: Mapping[str, str]) -> Value:
        """Return the value of the first of the setting's variables that `env` has, None without one."""
        variable = next((each for each in self.variables if env.get(each, "") != ""), None)
        return None if variable is None else self.parse(env[variable], variable)

    def spell(self, value: Value) -> str:
        """Return the text of `value` for `parse`."""
        return self.kind.spell(value)


def setting(default: T, kind: Kind, text: str, *horovod: str) -> T:
    """Return the field of a topic for a setting: its default, its kind, its help, and Horovod's variables."""
    # For type checkers `field` returns the default.
    return field(default=default, metadata={"kind": kind, "help": text, "horovod": horovod})


def settings_of(topic: str, owner: type) -> list[Setting]:
    """Describe the fields of `owner`, the class of a topic."""
    return [
        Setting(
            name=each.name,
            topic=topic,
            kind=each.metadata["kind"],
            default=cast(Value, each.default),
            help=each.metadata["help"],
            variables=(f"FARANDOLE_{each.name.upper()}", *each.metadata["horovod"]),
        )
        for each in fields(owner)
    ]


def _seconds(number: float, source: str) -> timedelta:
    try:
        return timedelta(seconds=number)
    except (OverflowError, ValueError) as error:
        raise ConfigError(source, f"{number} s is no duration: {error}") from error
