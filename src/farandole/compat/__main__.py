"""`python -m farandole.compat train.py ...`: a program that finds `import horovod` answered, as Python would run it."""

import os
import runpy
import sys
from collections.abc import Sequence

from farandole.compat import install
from farandole.compat.children import pass_on

__all__ = ["main"]

USAGE = """usage: python -m farandole.compat program.py [arguments]
       python -m farandole.compat -m module [arguments]
       python -m farandole.compat -c code [arguments]
"""


def main(words: Sequence[str]) -> int:
    """Run the program in this process, as `__main__`; what it raises, `SystemExit` too, goes through."""
    match list(words):
        case ["-m" | "-c" as how, what, *arguments]:
            _prepare([what if how == "-m" else how, *arguments])
            if how == "-m":
                runpy.run_module(what, run_name="__main__", alter_sys=True)
            else:
                exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
        case [program, *arguments] if not program.startswith("-"):
            if not os.path.exists(program):
                sys.stderr.write(f"farandole.compat: cannot open {program!r}: there is no such file\n")
                return 2
            _prepare([program, *arguments])
            if not sys.flags.safe_path:
                sys.path[0] = os.path.dirname(os.path.realpath(program))
            runpy.run_path(program, run_name="__main__")
        case ["-h" | "--help"]:
            sys.stdout.write(USAGE)
        case _:
            sys.stderr.write(USAGE)
            return 2
    return 0


def _prepare(arguments: Sequence[str]) -> None:
    install()
    pass_on()
    sys.argv[:] = arguments


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
