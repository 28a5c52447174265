"""Replacement of PySpark's daemon (spark.python.daemon.module) that has a warm process fork the real daemon.

Spark starts a daemon for each set of environment variables of tasks; each would import the framework again."""

import os
import runpy
import sys

from helpers.programs import FORKER, PYTHON, fork
from helpers.warm import Program

if __name__ == "__main__":
    if sys.executable != os.environ[PYTHON] or sys.flags.no_site:  # a test has set another Python for tasks
        runpy.run_module("pyspark.daemon", run_name="__main__", alter_sys=True)
        sys.exit()
    daemon = Program("-m", "pyspark.daemon", sys.argv[1:])
    standard = {number: number for number in range(3)}
    # No new session: the daemon makes a process group. It ends when Spark closes its input.
    with fork(os.environ[FORKER], daemon, os.environ, os.getcwd(), standard, session=False) as answers:
        answers.settimeout(None)
        answers.recv(100)
        sys.exit(int(answers.recv(100)))
