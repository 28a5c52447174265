"""The command `python -m farandole.compat train.py ...`: runs a program as Python would, with compat installed."""

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType, TracebackType

from farandole.compat import install
from farandole.compat.children import pass_on

# The files whose frames are above the program in a traceback.
_OURS = (__file__, runpy.run_path.__code__.co_filename)

USAGE = """usage: python -m farandole.compat program.py [arguments]
       python -m farandole.compat -m module [arguments]
       python -m farandole.compat -c code [arguments]
"""


def main(words: Sequence[str]) -> int:
    """Run the program in this process as `__main__`. Returns its exit code, or raises the program's `SystemExit`."""
    if list(words) in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        return 0
    how = words[0] if words and words[0] in ("-m", "-c") else ""
    named = words[1:] if how else words
    if not named or (not how and named[0].startswith("-")):
        sys.stderr.write(USAGE)
        return 2
    program = named[0]
    if not how and not os.path.exists(program):
        sys.stderr.write(f"farandole.compat: cannot open {program!r}: there is no such file\n")
        return 2
    install()
    pass_on()
    sys.argv[:] = ["-c", *named[1:]] if how == "-c" else named
    try:
        _run(how, program)
    except Exception as error:
        # Report as Python does, without the frames above the program.
        error.__traceback__ = _of_the_program(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _run(how: str, program: str) -> None:
    if how == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    elif how == "-c":
        _run_code(compile(program, "<string>", "exec", dont_inherit=True), ModuleType("__main__"))
    elif os.path.isdir(program):
        runpy.run_path(program, run_name="__main__")
    else:
        if not sys.flags.safe_path:
            sys.path[0] = os.path.dirname(os.path.realpath(program))
        path = os.path.abspath(program)
        loader = SourceFileLoader("__main__", path)
        module = ModuleType("__main__")
        module.__file__, module.__loader__ = path, loader
        _run_code(loader.source_to_code(loader.get_data(path), path), module)


def _run_code(code: CodeType, module: ModuleType) -> None:
    """Run `code` as the main module. It stays in `sys.modules`, because exit handlers may read it."""
    sys.modules["__main__"] = module
    exec(code, vars(module))


def _of_the_program(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback below the frames of this file and of `runpy`."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
