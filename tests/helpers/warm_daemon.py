"""Stand in for PySpark's daemon: has a process that has imported a framework fork it (spark.python.daemon.module).

Spark starts a daemon for each set of variables that its tasks have; each would import the framework again."""

import os
import runpy
import sys

from helpers.programs import FORKER, PYTHON, fork
from helpers.warm import Program

if __name__ == "__main__":
    if sys.executable != os.environ[PYTHON] or sys.flags.no_site:  # a test gives the tasks another one
        runpy.run_module("pyspark.daemon", run_name="__main__", alter_sys=True)
        sys.exit()
    daemon = Program("-m", "pyspark.daemon", sys.argv[1:])
    standard = {number: number for number in range(3)}
    # No session of its own: the daemon makes a process group. It ends when its input does, which only Spark holds.
    with fork(os.environ[FORKER], daemon, os.environ, os.getcwd(), standard, session=False) as answers:
        answers.settimeout(None)
        answers.recv(100)
        sys.exit(int(answers.recv(100)))
