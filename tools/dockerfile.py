"""Parser for Dockerfiles: stages, their instructions and their build arguments."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its name in capitals, its options (`--chmod=755`), the rest, and its line number."""

    name: str
    options: tuple[tuple[str, str], ...]
    rest: str
    line: int

    def option(self, name: str) -> str:
        """Return the value of an option, "" without it."""
        return dict(self.options).get(name, "")

    def words(self) -> list[str]:
        """Split the rest, a JSON list or a shell command line, into words."""
        found: list[str] = json.loads(self.rest) if self.rest.startswith("[") else shlex.split(self.rest)
        return found


@dataclass(slots=True)
class Stage:
    """One stage: its base image, its name, its instructions and their build arguments."""

    base: str
    name: str
    arguments: dict[str, str] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)


def read(path: Path, given: Mapping[str, str]) -> list[Stage]:
    """Return the stages. `given` are values of build arguments; raise `ValueError` for one that the file lacks."""
    stages: list[Stage] = []
    before: dict[str, str] = {}  # arguments in front of the first FROM
    for each in _instructions(path.read_text(encoding="utf-8")):
        if each.name == "ARG":
            name, _, default = each.rest.partition("=")
            values = stages[-1].arguments if stages else before
            values[name] = given.get(name, default or before.get(name, ""))
        elif each.name == "FROM":
            base, _, name = re.sub(r"\$\{(\w+)\}", lambda found: before[found[1]], each.rest).partition(" AS ")
            stages.append(Stage(base, name))
        else:
            stages[-1].instructions.append(each)
    unknown = set(given) - set(before).union(*(stage.arguments for stage in stages))
    if unknown:
        raise ValueError(f"{path} has no build argument {', '.join(sorted(unknown))}")
    return stages


def _instructions(text: str) -> Iterator[Instruction]:
    lines = [*enumerate(text.splitlines(), 1)]
    while lines:
        number, line = lines.pop(0)
        while line.endswith("\\"):
            line = line.removesuffix("\\") + lines.pop(0)[1].lstrip()
        if not line.strip() or line.startswith("#"):
            continue
        name, _, rest = line.partition(" ")
        options: list[tuple[str, str]] = []
        while found := re.match(r"--(\w+)=(\S+)\s+", rest):
            options.append((found[1], found[2]))
            rest = rest[found.end() :]
        yield Instruction(name, tuple(options), rest.strip(), number)
