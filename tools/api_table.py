"""Generator of docs/reference/horovod-api.md, the table of Horovod's interface and its counterpart in farandole.

src/farandole/compat/horovod_api.txt lists the names and arguments of Horovod's interface. The tool imports each name
through `farandole.compat`, compares the signatures, and takes the reasons for missing names from there."""

import argparse
import ast
import importlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from mxnet_stand_in import mxnet_stand_in

from farandole.compat import install, uninstall
from farandole.compat.interface import (
    COMMAND,
    ENVIRONMENT,
    INTERFACE,
    STATES,
    Entry,
    Finding,
    declared,
    missing,
    read_interface,
    there,
)

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "horovod-api.md"
_SHORT = 40  # characters of arguments that are shown beside others


# Looking names up.


def find(entry: Entry) -> Finding:
    """Look `entry` up in farandole; `farandole.compat.install()` must have been called."""
    if entry.module in (ENVIRONMENT, COMMAND):
        return declared(entry)
    try:
        ours = resolve(entry.module, entry.name)
    except (ImportError, AttributeError) as error:
        return missing(entry, _reason(str(error)))
    if why := getattr(ours, "why", ""):  # a stub that raises an error with this reason when it is called
        return missing(entry, why)
    if entry.same:
        wanted = resolve(entry.same, entry.name.rpartition(".")[2])
        problem = "" if ours is wanted or ours == wanted else f"is not that of {entry.same}"
    elif entry.value is not None:
        problem = "" if repr(ours) == entry.value else f"is {ours!r}"
    else:
        problem = "" if entry.arguments is None else differing(entry.arguments, _signature(entry, ours), entry.module)
    return there(entry, problem)


def resolve(module: str, name: str) -> object:
    """Return the object `name` of Horovod's `module`; "Class()" in a name stands for a new object of the class."""
    found: object = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part.removesuffix("()"))
        if part.endswith("()"):
            assert isinstance(found, type)
            found = found()
    return found


def _signature(entry: Entry, ours: object) -> list[inspect.Parameter]:
    assert callable(ours)
    parameters = list(inspect.signature(ours).parameters.values())
    holder, _, method = entry.name.rpartition(".")
    if holder and not isinstance(
        inspect.getattr_static(resolve(entry.module, holder), method), (staticmethod, classmethod)
    ):
        del parameters[0]  # self
    return parameters


def differing(arguments: str, ours: Sequence[inspect.Parameter], module: str = "horovod.torch") -> str:
    """Describe the first difference of the parameters `ours` from `arguments`; "" if all calls mean the same.

    Names in defaults are looked up in `module`, then in `horovod.torch`."""
    names = _names("horovod.torch") | _names(module)
    there = {each.name: each for each in ours}
    in_order = [each for each in ours if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    kinds = {each.kind for each in ours}
    wanted = list(_parameters(arguments))
    for place, (name, kind, default) in enumerate(wanted):
        if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            if kind not in kinds:
                return f"takes no {name}"
            continue
        if name not in there:
            return f"takes no {name}"
        if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and (place >= len(in_order) or in_order[place].name != name):
            return f"takes {name} at another place"
        if default is not None and not _means_the_same(there[name].default, default, names):
            return f"has {there[name].default!r} as {name}, not {default}"
    known = {name for name, _, _ in wanted}
    needed = [each.name for each in ours if each.name not in known and _is_needed(each)]
    return f"needs {', '.join(needed)}" if needed else ""


def _parameters(arguments: str) -> Iterator[tuple[str, object, str | None]]:
    """Yield name, kind and default of each parameter."""
    (function,) = ast.parse(f"def f({arguments}): ...").body
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    defaults: list[ast.expr | None] = [None] * (len(given.args) - len(given.defaults))
    for each, default in zip(given.args, defaults + list(given.defaults), strict=True):
        yield each.arg, inspect.Parameter.POSITIONAL_OR_KEYWORD, _spelled(default)
    if given.vararg:
        yield f"*{given.vararg.arg}", inspect.Parameter.VAR_POSITIONAL, None
    for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield each.arg, inspect.Parameter.KEYWORD_ONLY, _spelled(default)
    if given.kwarg:
        yield f"**{given.kwarg.arg}", inspect.Parameter.VAR_KEYWORD, None


def _spelled(default: ast.expr | None) -> str | None:
    return None if default is None else ast.unparse(default)


def _names(module: str) -> dict[str, object]:
    found = importlib.import_module(module)
    return {name: getattr(found, name) for name in found.__all__}


def _means_the_same(ours: object, theirs: str, names: dict[str, object]) -> bool:
    wanted: object = eval(theirs, dict(names))
    # farandole writes None for no arguments and for no compression.
    return (ours == wanted and type(ours) is type(wanted)) or (ours is None and theirs in ("{}", "Compression.none"))


def _is_needed(parameter: inspect.Parameter) -> bool:
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in optional


def _reason(error: str) -> str:
    return error.partition(": ")[2] if "is not part of farandole" in error else ""


# The page.

Found: TypeAlias = tuple[Entry, Finding]

HEAD = """# Horovod's interface

<!-- Written by tools/api_table.py. What Horovod has, and remarks, stand in src/farandole/compat/horovod_api.txt. -->

Each name of Horovod 0.28.1 that programs use, as `farandole.compat` answers it ([how](../guide/migrating.md)). "yes"
means that every call that Horovod's arguments allow is taken and means the same; more arguments may follow. A program
that asks for what is not there is told the reason given here.

"""


def render(found: Sequence[Found]) -> str:
    """Return the text of the page."""
    # No totals: changes on two branches would always conflict in them.
    parts = [HEAD, "| | |\n|---|---|\n", *(f"| {state} | {meaning} |\n" for state, meaning in STATES.items())]
    for module, group in groupby(found, key=lambda each: each[0].module):
        title = {ENVIRONMENT: "Environment variables", COMMAND: "Options of horovodrun"}.get(module, module)
        parts.append(f"\n## {title}\n\n| Horovod's | | |\n|---|---|---|\n")
        parts += _rows(list(group))
    return "".join(parts)


def _rows(found: Sequence[Found]) -> Iterator[str]:
    """Yield a row for each name, or one row for neighbours with the same finding."""

    def alike(each: Found) -> object:
        entry, finding = each
        plain = len(entry.arguments or "") < _SHORT and not entry.notes
        return (finding, entry.same) if plain or finding.state in ("no", "later") else id(entry)

    for _, group in groupby(found, key=alike):
        several = list(group)
        entry, finding = several[0]
        remark = finding.remark or (f"the same as in `{entry.same}`" if entry.same else "")
        names = ", ".join(f"`{_unbroken(each.shown)}`" for each, _ in several)
        yield f"| {names} | {finding.state} | {remark} |\n"


def _unbroken(text: str) -> str:
    return text.replace("|", "\\|")


def survey(text: str) -> list[Found]:
    """Look up all names of the interface file `text`."""
    with mxnet_stand_in():
        install()
        try:
            return [(entry, find(entry)) for entry in read_interface(text)]
        finally:
            uninstall()


def main() -> int:
    """Write the page, or with `--check` compare it with the file. Return 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is not up to date")
    check = parser.parse_args().check
    found = survey(INTERFACE.read_text(encoding="utf-8"))
    problems = [f"{entry.module}: {entry.name} {finding.problem}" for entry, finding in found if finding.problem]
    page = render(found)
    if check and page != PAGE.read_text(encoding="utf-8"):
        problems.append(f"{PAGE.relative_to(ROOT)} is out of date: run python tools/api_table.py")
    if not check:
        PAGE.write_text(page, encoding="utf-8")
    for each in problems:
        print(each, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
