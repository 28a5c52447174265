"""Generator of the operations of bindings whose adapter suffices: a function for each method of `Operations`.

Editors and mypy read the lines that it writes, so users see each function's arguments and docstring."""

import argparse
import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from farandole.core.operations.ops import Operations

ROOT = Path(__file__).resolve().parent.parent
FILES = [ROOT / "src" / "farandole" / binding / "ops.py" for binding in ("mxnet", "numpy", "torch")]
ABSENT = {"mxnet": ["bind"]}  # MXNet computes arrays later, and `bind` does not wait for them
MARK = "# Methods of Operations; tools/binding_operations.py writes all that follows.\n"


def render(text: str, absent: Sequence[str] = ()) -> str:
    """Return a binding's module with all operations: the functions above the mark, and the other methods below it.

    The methods `absent` are left out."""
    own = text.partition(MARK)[0]
    written = re.findall(r"^def ([a-z]\w*)\(", own, flags=re.M)
    methods = sorted(name for name, _ in inspect.getmembers(Operations, inspect.isfunction) if name[0] != "_")
    methods = [name for name in methods if name not in absent]
    functions = [f"{name} = _operations.{name}\n" for name in methods if name not in written]
    exported = [f'    "{name}",\n' for name in ["Compression", *methods]]
    return "".join([own, MARK, *functions, "\n__all__ = [\n", *exported, "]\n"])


def main() -> int:
    """Write the modules; with `--check` write nothing, and return 1 if one is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a module is out of date")
    check = parser.parse_args().check
    outdated = 0
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        made = render(text, ABSENT.get(file.parent.name, ()))
        outdated += made != text
        if made != text and check:
            print(f"{file.relative_to(ROOT)} is out of date: run python tools/binding_operations.py", file=sys.stderr)
        elif made != text:
            file.write_text(made, encoding="utf-8")
    return int(check and outdated > 0)


if __name__ == "__main__":
    sys.exit(main())
