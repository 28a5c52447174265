"""Checks for the rules of this code base that no ready-made linter has.

The tool prints each breach and exits with 1 if there is one."""

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

LONGEST_FILE = 400
LONGEST_FUNCTION = 60
PACKAGE = Path("src/farandole")
# Modules that may use `os.environ`: they read settings or the place of a rank, or write variables for child processes
# or NCCL.
ENVIRONMENT = (
    PACKAGE / "config.py",
    PACKAGE / "topology.py",
    PACKAGE / "other_launchers.py",
    PACKAGE / "meeting" / "launched",
    PACKAGE / "core" / "wiring" / "gpus.py",
    PACKAGE / "launch",
    PACKAGE / "integrations" / "torch_backend.py",
    PACKAGE / "ray" / "worker.py",
    PACKAGE / "spark",
    PACKAGE / "estimators",
    PACKAGE / "compat" / "children.py",
    PACKAGE / "compat" / "importable",
    PACKAGE / "integrations" / "flyte",
    PACKAGE / "integrations" / "mpi_operator.py",
)
PYTHON, OR_PYTHON = ["sys.executable"], ["executable or sys.executable"]
NATIVE = (PACKAGE / "core", PACKAGE / "data")
VAGUE_NAMES = ("common", "helper", "misc", "util", "utils")
# Optional packages: a test module calls pytest.importorskip before it imports one of them.
OPTIONAL = {
    *(
        "PIL",
        "deltalake",
        "flytekit",
        "flytekitplugins",
        "jax",
        "keras",
        "lightning",
        "matplotlib",
        "mlflow",
        "moto",
        "mxnet",
    ),
    *("optuna", "pandas", "prometheus_client", "pyarrow", "pyiceberg", "pyspark", "ray", "s3fs", "sklearn"),
    *("tensorboard", "tensorflow", "tf_keras", "torch", "yaml"),
    *(f"farandole.{name}" for name in ("jax", "keras", "lightning", "mxnet", "ray", "tensorflow", "torch")),
}


def breaches_in_any(path: Path, text: str) -> Iterator[str]:
    lines = text.count("\n")
    if lines > LONGEST_FILE:
        yield f"{path}: {lines} lines, {LONGEST_FILE} are the most; split it by concept"
    if path.stem in VAGUE_NAMES or path.parent.name in VAGUE_NAMES:
        yield f"{path}: its name says nothing; name the concept"
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"\b(TODO|FIXME|XXX)\b", line):
            yield f"{path}:{number}: name the debt as HACK(reason, until), or pay it"


def breaches_in_python(path: Path, text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > LONGEST_FUNCTION:
                yield f"{path}:{node.lineno}: {node.name} has {lines} lines, {LONGEST_FUNCTION} are the most"
        elif isinstance(node, ast.ExceptHandler):
            broad = node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException")
            if broad and all(isinstance(each, ast.Pass) for each in node.body):
                yield f"{path}:{node.lineno}: swallows every exception"
        elif isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and _is_os(node.value):
            if not _within(path, ENVIRONMENT):
                yield f"{path}:{node.lineno}: settings come from Config, the place of a rank from its context"
        elif isinstance(node, ast.List) and [*map(ast.unparse, node.elts[:1])] in (PYTHON, OR_PYTHON):
            if ast.unparse(node.elts[1]) not in ("'-P'", "'-I'"):
                yield f"{path}:{node.lineno}: start Python with -P, else it runs a logging.py of the working directory"
        elif isinstance(node, ast.ImportFrom) and node.module == "farandole._native" and not _within(path, NATIVE):
            yield f"{path}:{node.lineno}: only core and data meet the native module"


def breaches_at_import(path: Path, text: str) -> Iterator[str]:
    """Yield the statements of a module that register handlers when it is imported."""
    for node in ast.parse(text).body:
        calls = node.decorator_list if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else [node]
        for each in calls:
            if re.match(r"(atexit\.register|signal\.signal|os\.register_at_fork)\b", ast.unparse(each)):
                yield f"{path}:{node.lineno}: importing a module registers no handlers; do it at the first use"


def breaches_in_deferred(path: Path, text: str) -> Iterator[str]:
    """Yield the imports of our own modules within functions without a reason, a comment on the line or above it."""
    lines, late = text.splitlines(), dict[int, int]()
    functions = (
        each for each in ast.walk(ast.parse(text)) if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    for node in (each for function in functions for each in ast.walk(function)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            if any(each.partition(".")[0] == PACKAGE.name for each in modules):
                late[node.lineno] = node.end_lineno or node.lineno
    explained = 0  # the last line of an import with a reason, which an import on the next line shares
    for first, last in sorted(late.items()):
        if "#" in lines[first - 1] or lines[first - 2].lstrip().startswith("#") or first == explained + 1:
            explained = last
        else:
            yield f"{path}:{first}: imports our own module late; move it up, or give the reason above it"


def breaches_in_tests(path: Path, text: str) -> Iterator[str]:
    for node in ast.parse(text).body:
        if "importorskip" in ast.unparse(node):
            return
        modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        for module in modules:
            if OPTIONAL & {module.partition(".")[0], ".".join(module.split(".")[:2])}:
                yield f"{path}:{node.lineno}: imports {module}; call pytest.importorskip before"


def breaches_in_native(path: Path, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"\bgetenv\s*\(", line):
            yield f"{path}:{number}: the native core reads no environment; pass the setting in"
        if path.parent.name != "bind" and re.search(
            r'#include\s*[<"](Python\.h|nanobind|torch|tensorflow|cuda|mpi)', line
        ):
            yield f"{path}:{number}: the native core is built against nothing"
    for name, first, last in functions_in_native(text):
        lines = last - first + 1
        if lines > LONGEST_FUNCTION:
            yield f"{path}:{first}: {name} has {lines} lines, {LONGEST_FUNCTION} are the most"


def functions_in_native(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the name, first line and last line of each function defined in C++ code.

    A block is the body of a function if the text before its brace ends in a parameter list. A lambda belongs to the
    function around it."""
    code = re.sub(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', "", text)
    blocks: list[tuple[str, int]] = []  # the function's name, or "", and its first line
    line = first = 1
    head = ""
    for each in code:
        if each == "\n":
            line += 1
        if each == "{":
            found = re.search(r"([~\w:]+)\s*\([^{}]*\)\s*(const|noexcept|override|final|\s)*(->[^{};]*)?$", head)
            name = found[1] if found and not any(known for known, _ in blocks) else ""
            blocks.append(("" if name in ("if", "for", "while", "switch", "catch") else name, first))
            head = ""
        elif each == "}":
            if blocks and blocks[-1][0]:
                yield blocks[-1][0], blocks[-1][1], line
            del blocks[-1:]
            head = ""
        elif each == ";":
            head = ""
        elif each.isspace() and not head:
            first = line
        else:
            if not head:
                first = line
            head += each


def breaches_in_decisions(names: Sequence[str]) -> Iterator[str]:
    for name, another in pairwise(sorted(names)):
        if name[:4] == another[:4]:
            yield f"docs/adr: {name} and {another} have the same number; give the later one the next"


def _is_os(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "os"


def _within(path: Path, places: tuple[Path, ...]) -> bool:
    return any(path == place or place in path.parents for place in places)


def main() -> int:
    """Check the whole tree; return 1 if there is a breach."""
    found: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found += [*breaches_in_any(path, text), *breaches_in_python(path, text), *breaches_at_import(path, text)]
        found += breaches_in_deferred(path, text)
    for path in sorted(Path("tests").rglob("test_*.py")):
        found += breaches_in_tests(path, path.read_text(encoding="utf-8"))
    for path in sorted([*Path("native").rglob("*.cc"), *Path("native").rglob("*.h")]):
        text = path.read_text(encoding="utf-8")
        found += [*breaches_in_any(path, text), *breaches_in_native(path, text)]
    found += breaches_in_decisions([path.name for path in Path("docs/adr").glob("*.md")])
    for each in found:
        print(each, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
