"""Horovod's interface and what becomes of each name, option and variable: one table for the reference and for `check`.

The file `horovod_api.txt` lists the interface, with remarks. `refusals` has the reasons for what is not there."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from farandole.compat.absent import missing_module, missing_package
from farandole.compat.answers import MODULES
from farandole.compat.horovodrun import make_parser
from farandole.config import Config
from farandole.launch.options import Foreign, Ignore, SetSetting
from farandole.meeting.launched.elastic import MemberEnvironment
from farandole.refusals import ABSENT_NAMES, IGNORED_PARAMS, IGNORED_VARIABLES, NEEDLESS_VARIABLES, ignored_param
from farandole.topology import JobEnvironment

INTERFACE = Path(__file__).with_name("horovod_api.txt")
STATES = {
    "yes": "there, with the same arguments",
    "better": "there, and better",
    "differs": "there, with a difference",
    "ignored": "accepted, and without an effect",
    "later": "not there yet",
    "no": "not there, on purpose",
}
ENVIRONMENT, COMMAND = "environment", "horovodrun"


@dataclass(frozen=True, slots=True)
class Entry:
    """One name of Horovod's interface."""

    module: str
    name: str
    arguments: str | None = None  # of a function or a class
    value: str | None = None  # of a constant
    same: str = ""  # the module that exports the same object
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The name with its arguments."""
        return self.name if self.arguments is None else f"{self.name}({self.arguments})"


@dataclass(frozen=True, slots=True)
class Finding:
    """The state of one entry in farandole."""

    state: str
    remark: str = ""
    problem: str = ""  # a difference that the interface file does not explain, or a name that farandole lacks


def read_interface(text: str) -> list[Entry]:
    """Parse the interface file. Raise `ValueError` for a line of a form that the head of the file does not describe."""
    entries: list[Entry] = []
    first = 0  # index of the first entry that the latest line made
    module = ""
    for number, line in enumerate(text.splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        if match := re.fullmatch(r"  (better|differs|no|later): (.+)", line):
            for entry in entries[first:]:
                entry.notes[match[1]] = match[2]
            continue
        first = len(entries)
        if match := re.fullmatch(r"\[([\w.]+)\]", line):
            module = match[1]
        elif match := re.fullmatch(r"(?:(\S+): )?same as ([\w.]+): (.+)", line):
            within = f"{match[1]}." if match[1] else ""
            entries += [Entry(module, f"{within}{name}", same=match[2]) for name in match[3].split()]
        elif match := re.fullmatch(r"names: (.+)", line):
            entries += [Entry(module, name) for name in match[1].split()]
        elif module in (ENVIRONMENT, COMMAND) or re.fullmatch(r"[\w.]+", line):
            entries.append(Entry(module, line))
        elif match := re.fullmatch(r"([\w.]+)\((.*)\)", line):
            entries.append(Entry(module, match[1], arguments=match[2]))
        elif match := re.fullmatch(r"([\w.]+) = (.+)", line):
            entries.append(Entry(module, match[1], value=match[2]))
        else:
            raise ValueError(f"line {number} is nothing that the head of the file describes: {line}")
    return entries


def option_of(entry: Entry) -> tuple[list[str], list[str]]:
    """Return the flags of a command-line option, and the placeholders of its values."""
    words = entry.name.replace(",", "").split()
    return [word for word in words if word.startswith("-")], [word for word in words if not word.startswith("-")]


def declared(entry: Entry) -> Finding:
    """Return what becomes of a name, option or variable, from the tables alone: no framework is imported."""
    if entry.module == ENVIRONMENT:
        return find_variable(entry)
    if entry.module == COMMAND:
        return find_option(entry)
    whole = f"{entry.module}.{entry.name}"
    module = whole if whole in MODULES else entry.module
    reason = "" if missing_package(module) else (missing_module(module) or "").partition(": ")[2]
    reason = reason or ABSENT_NAMES.get(entry.module, {}).get(entry.name, "")
    if param := ignored_param(entry.name.rpartition(".")[2]):
        reason = IGNORED_PARAMS[param]
    absent = reason or "no" in entry.notes or "later" in entry.notes
    return missing(entry, reason) if absent else there(entry)


def find_variable(entry: Entry) -> Finding:
    """Return what becomes of an environment variable."""
    by_variable = {variable: setting.name for setting in Config.settings() for variable in setting.variables}
    job = JobEnvironment(
        rank=0, size=1, rendezvous="h:1", secret=b"", local_rank=0, local_size=1, cross_rank=0, cross_size=1, host="h"
    )
    if entry.name in by_variable:
        return there(entry, shown=f"`{by_variable[entry.name]}`")
    member = MemberEnvironment(number=0, launcher="h:1", secret=b"")
    if entry.name in job.write() | member.write():
        return there(entry, shown="set for each rank")
    if entry.name in NEEDLESS_VARIABLES:
        return there(entry, shown=f"not needed: {NEEDLESS_VARIABLES[entry.name]}")
    return missing(entry, IGNORED_VARIABLES.get(entry.name, ""), "ignored")


def find_option(entry: Entry) -> Finding:
    """Return what becomes of an option of `horovodrun`."""
    flags, _ = option_of(entry)
    actions = {flag: action for action in make_parser()._actions for flag in action.option_strings}
    lacking = [flag for flag in flags if flag not in actions]
    if lacking:
        return Finding("no", problem=f"lacks {', '.join(lacking)}")
    action = actions[flags[0]]
    if isinstance(action, Foreign):
        return missing(entry, action.why, "ignored" if isinstance(action, Ignore) else "no")
    return there(entry, shown=f"`{action.setting.name}`" if isinstance(action, SetSetting) else "")


def there(entry: Entry, problem: str = "", shown: str = "") -> Finding:
    """Return the finding about what is there: its notes, and `shown` before them."""
    notes = entry.notes
    if problem and "differs" in notes:
        problem = ""
    state = next((each for each in ("better", "differs") if each in notes), "yes")
    remarks = [shown, notes.get("better", ""), notes.get("differs", "")]
    return Finding(state, "; ".join(each for each in remarks if each), problem or _needless(entry, ("no", "later")))


def missing(entry: Entry, reason: str, otherwise: str = "no") -> Finding:
    """Return the finding about what is not there, for `reason` unless a note has one; its state is `otherwise`."""
    state = next((each for each in ("no", "later") if each in entry.notes), None)
    if state is not None:
        return Finding(state, entry.notes[state], _needless(entry, ("better", "differs")))
    if not reason:
        return Finding("no", problem="is missing, and nothing says why")
    return Finding("later" if re.search(r"\b(yet|later)\b", reason) else otherwise, reason)


def _needless(entry: Entry, notes: Sequence[str]) -> str:
    return "".join(f"has a note `{note}:` that is not true" for note in notes if note in entry.notes)
