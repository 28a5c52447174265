"""What a process loads before it does anything: what it uses, as each rank of a job pays for the rest."""

import ast
import importlib
import json
import pkgutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import numpy as np
import pytest

import farandole.data
import farandole.spark

FRAMEWORKS = "jax keras lightning tensorflow torch"
DATA = "asyncio fsspec pandas pyarrow"
SPARK = "py4j pyspark rich"

# What is done, and what need not be loaded for it.
STARTS = {
    "the launcher's worker": ("import farandole.launch.worker", f"{FRAMEWORKS} {DATA} {SPARK} numpy subprocess"),
    "a task's rank": ("import farandole.spark.jobs.child", f"{FRAMEWORKS} {DATA} {SPARK} numpy subprocess"),
    "a rank's messages": ("from farandole.spark import log_to_driver", f"{FRAMEWORKS} {DATA} {SPARK} numpy"),
    "operations": (
        "import farandole.numpy",
        f"{FRAMEWORKS} {DATA} {SPARK} farandole.data farandole.launch optuna statistics subprocess",
    ),
    "a converter on a rank": ("import farandole.spark.rows.dataset_converter", f"{FRAMEWORKS} {DATA} {SPARK}"),
    "a reader of fed rows": (
        "from farandole.data import make_feed_reader",
        f"{FRAMEWORKS} {SPARK} asyncio fsspec pandas pyarrow.parquet",
    ),
    "a trainer's rows": ("import farandole.estimators.trainers.run", f"{FRAMEWORKS} {SPARK} pandas pyarrow.parquet"),
    "Keras models of a trainer": (
        "import farandole.estimators.trainers.keras.model",
        f"{FRAMEWORKS} {SPARK} pandas pyarrow.parquet",
    ),
    "a trainer's report": ("import farandole.estimators.trainers.report", f"{FRAMEWORKS} {SPARK} pandas pyarrow"),
    "a function on this machine": ("from farandole import run", f"{FRAMEWORKS} {DATA} {SPARK} numpy"),
}


def loaded(code: str, *arguments: str) -> set[str]:
    """Run `code` in a process of its own; the modules that are there then."""
    code += "\nimport json, sys\nprint(json.dumps([*sys.modules]))"
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("name", STARTS)
def test_a_start_brings_what_it_uses(name: str) -> None:
    code, needless = STARTS[name]
    assert loaded(code) & set(needless.split()) == set()


FEED = """
import sys
from farandole.data import FeedLoader, ShardSource
for batch in FeedLoader(ShardSource(sys.argv[1]), batch_size=2, policy="join"):
    assert sum(len(column) for column in batch.values()) == 2 * len(batch)
"""


@pytest.mark.parametrize("column", ["numbers", "arrays"])
def test_a_fed_rank_brings_what_its_rows_need(tmp_path: Path, column: str) -> None:
    pa = pytest.importorskip("pyarrow")
    rows = np.arange(12.0) if column == "numbers" else list(np.arange(12.0).reshape(4, 3))
    table = pa.table({"number": np.arange(len(rows)), column: pa.array(rows)})
    with pa.ipc.new_stream(tmp_path / "rows.arrow", table.schema) as writer:
        writer.write_table(table)
    there = loaded(FEED, str(tmp_path / "rows.arrow"))
    needless = f"{FRAMEWORKS} {SPARK} asyncio fsspec pandas pyarrow.fs pyarrow.parquet ssl"
    assert there & set(needless.split()) == set()
    assert ("pyarrow.compute" in there) == (column == "arrays")


@pytest.mark.parametrize("package", [farandole.data, farandole.spark], ids=lambda package: package.__name__)
def test_a_package_offers_names_on_demand(package: object) -> None:
    name = package.__name__
    assert {each for each in loaded(f"import {name}") if each.startswith(f"{name}.")} == set()
    assert dir(package) == sorted(package.__all__)
    # A module of the same name would take a name's place as soon as somebody imports it.
    assert not {module.name for module in pkgutil.iter_modules(package.__path__)} & set(package.__all__)
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        package.nothing  # noqa: B018


@pytest.mark.parametrize(("package", "needs"), [("farandole.data", "fsspec"), ("farandole.spark", "pyspark")])
def test_all_names_are_there(package: str, needs: str) -> None:
    pytest.importorskip(needs)
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if getattr(module, name, None) is None] == []


def imports_of(tree: ast.Module) -> set[str]:
    """Return the names of the modules, or of names in modules, that a module imports anywhere, by statement or call."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found |= {each.name for each in names}
            case ast.ImportFrom(module=str(module), names=names):
                found |= {f"{module}.{each.name}" for each in names}
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(module))]):
                found.add(module)
    return found


def test_no_import_closes_a_loop() -> None:
    """Imports within functions and for type checkers count, too."""
    root = Path(farandole.__file__).parent
    files = {
        ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in root.rglob("*.py")
    }
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        named = imports_of(ast.parse(path.read_text(encoding="utf-8")))
        # A name is a module's own, or one of a module.
        graph[module] = {name if name in files else name.rpartition(".")[0] for name in named} & files.keys()
    TopologicalSorter(graph).prepare()  # raises CycleError with the loop
