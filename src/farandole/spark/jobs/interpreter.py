"""Python of Spark's tasks: its choice on a local master, and the error of a Python that cannot run ranks."""

import os
import re
import sys

from pyspark.sql import SparkSession

from farandole.errors import ConfigError
from farandole.spark.jobs.application import is_connect, is_local
from farandole.spark.jobs.chosen import application_of

_NAME = "PYSPARK_PYTHON"
_LACKS = re.compile(r"ModuleNotFoundError: No module named '(farandole|pyarrow|pandas|numpy)\b")
_OTHER_VERSION = re.compile(r"PYTHON_VERSION_MISMATCH\].*?different version: ([\d.]+) than that in driver: ([\d.]+)")


def use_own_interpreter(spark: SparkSession) -> None:
    """Make a local master run its tasks in this Python, with its `sys.path`, unless PYSPARK_PYTHON names another one.

    Spark would run the first python3 on PATH, which may lack this Python's packages, and would not find modules beside
    the user's script. Does nothing on clusters and for Spark Connect, whose server chooses its Python."""
    if is_connect(spark) or not is_local(application_of(spark).master):
        return
    context = spark.sparkContext
    if _NAME not in os.environ:
        context.pythonExec = sys.executable
    if context.pythonExec == sys.executable:
        # Set only once, because Spark starts another daemon of workers for each value.
        context.environment.setdefault("PYTHONPATH", os.pathsep.join(_added_folders()))


def _added_folders() -> list[str]:
    """Return the folders of `sys.path` that another process of this Python would lack, such as the script's."""
    own = tuple(f"{each}{os.sep}" for each in (sys.prefix, sys.base_prefix))
    return [path for path in map(os.path.abspath, filter(None, sys.path)) if not path.startswith(own)]


def interpreter_error(spark: SparkSession, spark_error: str) -> ConfigError | None:
    """Return the error of a Python that cannot run ranks, given the text of Spark's exception; None for any other."""
    lacks, other = _LACKS.search(spark_error), _OTHER_VERSION.search(spark_error)
    if lacks is None and other is None:
        return None
    problem = f"has no {lacks[1]}" if lacks else f"is Python {other[1]}, the driver's is {other[2]}" if other else ""
    python = application_of(spark).python
    if is_connect(spark):
        return ConfigError(
            _NAME,
            f"the Python of Spark's tasks, {python}, {problem}. Set the variable where the server starts, to a Python "
            f"{sys.version_info[0]}.{sys.version_info[1]} with farandole that all executors have",
        )
    if lacks and python == sys.executable:
        # This Python has them: a function in the DataFrame's plan keeps the Python of the time when it was made.
        python = f"{os.environ.get(_NAME, 'python3')} (for which a UDF of the DataFrame was made)"
    given = "" if _NAME in os.environ else "; the variable is not set"
    return ConfigError(
        _NAME,
        f"the Python of Spark's tasks, {python}, {problem}{given}. Before the session starts, set it to a Python that "
        f"all executors have, with farandole in it (here {sys.executable}), or send one along as an archive "
        "(spark.archives)",
    )
