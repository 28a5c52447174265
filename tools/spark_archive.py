"""Class-data archive of Spark, with which the tests' Java processes start in a third of the time.

`python tools/spark_archive.py` writes it below build/ unless it is there. It does nothing without PySpark or Java.
See https://docs.oracle.com/en/java/javase/17/vm/class-data-sharing.html.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 300  # seconds

# A process of a few seconds gains nothing from the second JIT compiler or a parallel garbage collector.
OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
QUIET = "-Xlog:disable -Xlog:all=error:stderr"  # Java ignores an archive of another version silently

# A program that loads the classes that tests use: DataFrames, Arrow, barrier tasks.
PROGRAM = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[2]").config("spark.log.level", "OFF").getOrCreate()
frame = spark.createDataFrame([([float(n)], n) for n in range(8)], "x array<float>, y int").repartition(2)
frame.mapInArrow(lambda batches: batches, frame.schema, barrier=True).toPandas()
spark.sparkContext.parallelize(range(2), 2).barrier().mapPartitions(list).collect()
spark.range(8).selectExpr("sum(id)").collect()
spark.stop()
"""


def archive() -> Path:
    """Return the archive's path; the file need not exist."""
    return ROOT / "build" / f"spark-{version('pyspark')}.jsa"


def java_options() -> str:
    """Return the Java options for tests, with the archive if it exists."""
    there = importlib.util.find_spec("pyspark") is not None and archive().exists()
    return f'{OPTIONS} {QUIET} "-XX:SharedArchiveFile={archive()}"' if there else OPTIONS


def main() -> int:
    """Write the archive; return 0 even if that fails, because tests only take longer without it."""
    if importlib.util.find_spec("pyspark") is None or archive().exists():
        return 0
    java = subprocess.run([ROOT / "tools" / "check_java.sh"], capture_output=True, timeout=60, check=False)
    if java.returncode != 0:
        return 0
    with tempfile.TemporaryDirectory(prefix="spark-archive-", dir=ROOT / "build") as folder:
        made = Path(folder, "made.jsa")
        options = f"{OPTIONS} {QUIET} -XX:ArchiveClassesAtExit={made}"
        env = {
            **os.environ,
            "SPARK_SUBMIT_OPTS": options,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
        }
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=env,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        if done.returncode != 0 or not made.exists():
            print(
                f"spark_archive: not made, the tests take longer\n{(done.stdout + done.stderr)[-2000:]}",
                file=sys.stderr,
            )
            return 0
        made.replace(archive())
    return 0


if __name__ == "__main__":
    sys.exit(main())
