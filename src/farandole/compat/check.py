"""`farandole check`: what becomes of each name, option and variable of a program of Horovod, or of torch over gloo.

Programs are read, not run, and no framework is imported. The answers are those of the reference's table
(`interface`)."""

import argparse
import ast
import io
import json
import re
import shlex
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from farandole.compat.absent import missing_module, missing_package
from farandole.compat.answers import MODULES, PACKAGES
from farandole.compat.interface import COMMAND, ENVIRONMENT, INTERFACE, Entry, Finding, declared, read_interface
from farandole.config import Config
from farandole.launch.options import CommandParser
from farandole.other_launchers import LAUNCHERS
from farandole.refusals import (
    IGNORED_ARGUMENTS,
    IGNORED_PARAMS,
    IGNORED_READER_ARGUMENTS,
    REFUSED_READER_ARGUMENTS,
    REFUSED_SPARK_MPI,
)
from farandole.topology import TORCH_PLACES, TORCH_STORE

TORCH = "torch.distributed"
_AS_GLOO = 'becomes farandole\'s with backend="farandole" in its place, or with FARANDOLE_AS_GLOO=1'
_TORCH_NAMES = {
    f"{TORCH}.split_group": Finding("no", "torch offers it for NCCL only; call new_group"),
    f"{TORCH}.init_process_group": Finding("yes", f"a group of gloo {_AS_GLOO}"),
}
_REFUSED = ("no", "later")
_READERS = {**dict.fromkeys(IGNORED_READER_ARGUMENTS, Finding("ignored"))} | {
    name: Finding("no", why) for name, why in REFUSED_READER_ARGUMENTS.items()
}
# By the end of a function's name: arguments with an answer of their own.
_ARGUMENTS: Mapping[str, Mapping[str, Finding]] = {
    "horovod.run": {name: Finding("ignored", why) for name, why in IGNORED_ARGUMENTS.items()},
    "spark.run": {"use_mpi": Finding("no", REFUSED_SPARK_MPI)},
    "Estimator": {name: Finding("ignored", why) for name, why in IGNORED_PARAMS.items()},
    "make_reader": _READERS,
    "make_batch_reader": _READERS,
}
_OF_EVERY_MODULE = ("__doc__", "__file__", "__name__", "__path__", "__spec__")
_VARIABLE = re.compile(r"HOROVOD_[A-Z0-9_]+")
_STATES = ("yes", "better", "differs", "ignored", "unknown", *_REFUSED)


class Use(NamedTuple):
    """A name, option or variable in a line of a program, and what becomes of it."""

    line: int
    what: str
    finding: Finding


def run_check(words: Sequence[str]) -> int:
    """Run the command with `words`, the arguments of `farandole check`; return 1 if something is refused."""
    given = check_parser().parse_args(words)
    refused = False
    for path in given.files:
        try:
            text, is_python = _read(path)
            uses = find_uses(text, is_python=is_python)
        except (OSError, ValueError, SyntaxError) as error:
            sys.stderr.write(f"farandole: cannot read {path}: {error}\n")
            return 2
        for use in uses:
            if given.all or use.finding.state != "yes" or use.finding.remark:
                remark = f"; {use.finding.remark}" if use.finding.remark else ""
                sys.stdout.write(f"{path}:{use.line}: {use.what}: {use.finding.state}{remark}\n")
        counts = {state: sum(use.finding.state == state for use in uses) for state in _STATES}
        total = (
            ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "nothing of Horovod or gloo"
        )
        sys.stdout.write(f"{path}: {total}\n")
        refused = refused or any(counts[state] for state in _REFUSED)
    return 1 if refused else 0


def _read(path: Path) -> tuple[str, bool]:
    """Return the text of a program, and whether it is Python: by its name, or by its first line."""
    code = path.read_bytes()
    if path.suffix == ".ipynb":
        text = _code_of_notebook(json.loads(code))
        # Magic commands are no Python; their lines count.
        return re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", text), True
    if path.suffix != ".py" and not re.match(rb"#!.*python", code):
        return code.decode(errors="replace"), False
    encoding, _ = tokenize.detect_encoding(io.BytesIO(code).readline)
    return code.decode(encoding), True


def _code_of_notebook(notebook: Any) -> str:
    """Return the code of all cells; raises `ValueError` for what is no notebook, or one of an older format."""
    try:
        return "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    except (KeyError, TypeError) as error:
        remedy = "convert an older one by: jupyter nbconvert --to notebook"
        raise ValueError(f"it is no notebook of format 4; {remedy}") from error


def check_parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments of `farandole check`."""
    parser = CommandParser(
        prog="farandole check",
        description="Read programs of Horovod, or of torch.distributed over gloo, and say line by\n"
        "line what becomes of each name, option and variable. Nothing is run. Ends with\n"
        "code 1 if something is refused.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="program, notebook, or a script of a shell")
    parser.add_argument("--all", action="store_true", help="show names that mean the same, too")
    return parser


def find_uses(text: str, *, is_python: bool = True) -> list[Use]:
    """Return the uses in a Python program, or in a script of a shell, by line; raises `SyntaxError`."""
    if not is_python:
        lines = re.sub(r"\\\n", "  ", text).splitlines()
        found = [use for number, line in enumerate(lines, 1) for use in _in_text(line, number)]
        return list(dict.fromkeys(found))
    reader = _Reader()
    reader.visit(ast.parse(text))
    return sorted(dict.fromkeys(reader.uses), key=lambda use: use.line)


class _Table:
    """The entries of the interface, by module and name."""

    def __init__(self) -> None:
        entries = read_interface(INTERFACE.read_text(encoding="utf-8"))
        self.entries = {(entry.module, entry.name): entry for entry in entries}
        self.options = {
            flag: entry for entry in entries if entry.module == COMMAND for flag in re.findall(r"-[\w-]+", entry.name)
        }

    def name(self, full: str) -> Entry | None:
        """Return the entry of the dotted name, or of the nearest one above it: of the class for a method."""
        module, _, name = full.rpartition(".")
        while module and module not in MODULES:
            module, _, above = module.rpartition(".")
            name = f"{above}.{name}"
        while name and (module, name) not in self.entries:
            name = name.rpartition(".")[0]
        return self.entries.get((module, name))

    def find(self, full: str) -> Finding:
        """Return what becomes of the module or name `full`."""
        if full.startswith(TORCH):
            return _TORCH_NAMES.get(full, Finding("yes"))
        entry = self.name(full)
        if entry is not None:
            return declared(entry)
        nearest = full if full in MODULES else full.rpartition(".")[0]
        absent = "" if missing_package(nearest) else (missing_module(nearest) or "").partition(": ")[2]
        if absent or full in MODULES:
            return Finding("no", absent) if absent else Finding("yes")
        name = full.rpartition(".")[2]
        known = nearest in MODULES and (name in MODULES[nearest].own or name in _OF_EVERY_MODULE)
        return Finding("yes") if known else Finding("unknown", "it is not in the table of Horovod's names")

    def variable(self, name: str) -> Finding | None:
        """Return what becomes of an environment variable; None if it is neither Horovod's nor a launcher's."""
        ours = {variable for setting in Config.settings() for variable in setting.variables}
        if (ENVIRONMENT, name) in self.entries or name in ours:
            return declared(self.entries.get((ENVIRONMENT, name), Entry(ENVIRONMENT, name)))
        if name in (*TORCH_PLACES, *TORCH_STORE):
            return Finding("yes", "set for each rank of farandole run; --no-torch-env leaves it out")
        if name == "GLOO_SOCKET_IFNAME":
            return Finding("differs", "set FARANDOLE_INTERFACE for groups of farandole")
        title = next((row.title for row in LAUNCHERS if name in (row.size, row.rank)), "")
        if title:
            return Finding("differs", f"only {title} sets it; call rank() or size(), or read FARANDOLE_RANK or _SIZE")
        return Finding("unknown", "Horovod 0.28.1 does not read it") if _VARIABLE.fullmatch(name) else None


@cache
def _table() -> _Table:
    return _Table()


class _Reader(ast.NodeVisitor):
    """Collects the uses in a program. `names` maps its own names to dotted names of modules, classes and functions."""

    def __init__(self) -> None:
        self.uses: list[Use] = []
        self._names: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        """Note the modules, and the names by which the program calls them."""
        for alias in node.names:
            if _is_ours(alias.name):
                self._add(node, alias.name)
            whole = alias.name if alias.asname else alias.name.partition(".")[0]
            self._names[alias.asname or whole] = whole

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Note the names that are imported from a module."""
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            self._names[alias.asname or alias.name] = full
            if node.level == 0 and alias.name != "*" and _is_ours(full):
                self._add(node, full)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Note a dotted name."""
        full = self._resolve(node)
        if full is None:
            self.generic_visit(node)
        elif _is_ours(full):
            self._add(node, full)

    def visit_Call(self, node: ast.Call) -> None:
        """Note the arguments of a call, and the variables that it reads."""
        full = self._resolve(node.func) or ""
        if full in ("os.getenv", "os.environ.get", "os.environ.setdefault", "os.environ.pop") and node.args:
            self._add_variable(node.args[0])
        elif full == f"{TORCH}.init_process_group":
            self._check_backend(node)
        elif _is_ours(full):
            self._check_arguments(node, full)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Note a variable of `os.environ`."""
        if self._resolve(node.value) == "os.environ":
            self._add_variable(node.slice)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Note the variables and command lines in a text."""
        if isinstance(node.value, str):
            for number, line in enumerate(node.value.splitlines()):
                self.uses += _in_text(line, node.lineno + number)

    def _resolve(self, node: ast.expr) -> str | None:
        """Return the dotted name for which `node` stands, if it begins with an imported name."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        above = self._resolve(node.value) if isinstance(node, ast.Attribute) else None
        return f"{above}.{node.attr}" if above is not None and isinstance(node, ast.Attribute) else None

    def _add(self, node: ast.stmt | ast.expr, full: str) -> None:
        self.uses.append(Use(node.lineno, full, _table().find(full)))

    def _add_variable(self, node: ast.expr) -> None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            finding = _table().variable(node.value)
            self.uses += [] if finding is None else [Use(node.lineno, node.value, finding)]

    def _check_backend(self, node: ast.Call) -> None:
        given = [*node.args[:1], *(each.value for each in node.keywords if each.arg == "backend")]
        value = ast.unparse(given[0]) if given else ""
        if not given or "gloo" in value or not isinstance(given[0], ast.Constant):
            self.uses.append(Use(node.lineno, f"backend {value or 'gloo, the default'}", Finding("yes", _AS_GLOO)))
        elif "farandole" not in value:
            self.uses.append(Use(node.lineno, f"backend {value}", Finding("yes", "stays torch's own")))

    def _check_arguments(self, node: ast.Call, full: str) -> None:
        entry = _table().name(full)
        own = next((row for end, row in _ARGUMENTS.items() if f".{full}".endswith(end)), {})
        for given in node.keywords:
            what = f"{full}({given.arg}=)"
            if given.arg is not None and given.arg in own:
                off = isinstance(given.value, ast.Constant) and given.value.value in (None, False)
                self.uses += [] if off else [Use(given.value.lineno, what, own[given.arg])]
            elif given.arg and entry is not None and entry.arguments and not _takes(entry.arguments, given.arg):
                unknown = Finding("unknown", "Horovod 0.28.1 takes no such argument")
                self.uses.append(Use(given.value.lineno, what, unknown))


def _is_ours(full: str) -> bool:
    return full.partition(".")[0] in PACKAGES or full == TORCH or full.startswith(f"{TORCH}.")


def _takes(arguments: str, name: str) -> bool:
    return bool(re.search(rf"(?:^|, ){re.escape(name)}(?:=|,|$)", arguments)) or "**" in arguments


def _in_text(line: str, number: int) -> Iterator[Use]:
    """Yield the variables of Horovod, and the options of `horovodrun`, in a line of text."""
    for name in _VARIABLE.findall(line):
        finding = _table().variable(name)
        if finding is not None:
            yield Use(number, name, finding)
    _, command, rest = line.partition("horovodrun ")
    if not command:
        return
    try:
        words = iter(shlex.split(rest, comments=True))
    except ValueError:  # a quote that ends in another line
        words = iter(rest.split())
    for word in words:
        flag = word.partition("=")[0]
        entry = _table().options.get(flag)
        if not flag.startswith("-"):
            return  # the program begins
        yield Use(number, f"horovodrun {flag}", Finding("unknown") if entry is None else declared(entry))
        if "=" not in word and entry is not None and re.search(r" [A-Z]", entry.name):
            for _ in re.findall(r" [A-Z]+", entry.name):
                next(words, None)
