"""Python programs that start with a framework imported: forked from a process that has it, instead of an exec.

Importing torch, its optimizers and scikit-learn takes 6 seconds of a core in each process, and TensorFlow 7; a test of
two ranks pays that twice. A forked program is a real child of its parent, with the same session, descriptors, signals
and environment as after an exec, but the modules of the framework are already imported. Its own children start in the
same way: the launcher's guards, the ranks, the processes of a Spark task.

A process that cannot be forked safely, because it has threads unknown to Python, starts its children with exec. So does
each command that is not a plain Python program."""

import _frozen_importlib
import atexit
import contextlib
import ctypes
import gc
import hmac
import importlib
import io
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

SPARK = ("pandas", "pyarrow.parquet", "pyspark.worker", "pyspark.sql", "pyspark.ml")
TORCH = ("numpy", "sklearn.datasets", "torch", "torch._dynamo", "torch.utils.data", "lightning.pytorch", *SPARK)
# Modules to import before programs run, by framework. "any" is for tasks of Spark sessions that tests of several
# frameworks share; a warm process of "any" also serves the other frameworks.
FRAMEWORKS: Mapping[str, tuple[str, ...]] = {
    "torch": TORCH,
    "tensorflow": ("numpy", "sklearn.datasets", "tensorflow", *SPARK),
    "any": (*TORCH, "tensorflow"),
}
# Thresholds of Python's garbage collector. With the default ones it takes a tenth of the processor time of all tests.
SELDOM = (50_000, 20, 50)
KERAS_ON = "tensorflow"  # the backend of the Keras that TensorFlow imports
ALONE = frozenset("uBEIsSP")  # options of Python before a program that do not affect tests
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)

# Packages with state of their process, such as its task. Children of a forked program import them again.
STATEFUL = frozenset({"pyspark"})

_staying: frozenset[str] = frozenset()  # top-level packages that stay imported when a program starts
_site: list[str] = []  # sys.path without PYTHONPATH and the program's folder
_exec = os.execvp


@dataclass(frozen=True)
class Program:
    """A Python program, `python -m name`, `python file` or `python -c text`, with its arguments."""

    kind: str
    name: str
    arguments: list[str]
    safe_path: bool = False  # python -P: sys.path lacks the program's folder and the working directory

    @classmethod
    def of(cls, command: Sequence[str]) -> "Program | None":
        """Return the program that a command runs with this Python, or None for another command."""
        words = [os.fsdecode(word) for word in command]
        if not words or not _is_this_python(words[0]):
            return None
        at = 1
        while at < len(words) and words[at].startswith("-") and set(words[at][1:]) <= ALONE and words[at] != "-":
            at += 1
        if at == len(words):
            return None
        safe_path = any("P" in word for word in words[1:at])
        if words[at] in ("-m", "-c") and at + 1 < len(words):
            return cls(words[at], words[at + 1], words[at + 2 :], safe_path)
        return None if words[at].startswith("-") else cls("", words[at], words[at + 1 :], safe_path)

    def run(self) -> None:
        """Run the program in this process, as __main__."""
        sys.argv = [self.name if self.kind == "" else self.kind, *self.arguments]
        if not self.safe_path:
            sys.path.insert(0, self._folder())
        if self.kind == "-m":
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        elif self.kind == "-c":
            module = types.ModuleType("__main__")
            sys.modules["__main__"] = module
            exec(compile(self.name, "<string>", "exec"), vars(module))
        else:
            runpy.run_path(self.name, run_name="__main__")

    def _folder(self) -> str:
        """Return the first folder of sys.path for this program."""
        return {"-m": os.getcwd(), "-c": ""}.get(self.kind, os.path.dirname(os.path.abspath(self.name)))

    def words(self) -> list[str]:
        """Return the program's command line."""
        return [sys.executable, *["-P"] * self.safe_path, *filter(None, [self.kind]), self.name, *self.arguments]


def preload(framework: str) -> None:
    """Import the modules of `framework` in this process, and fork its Python children from now on."""
    global _staying, _site
    gc.set_threshold(*SELDOM)
    os.environ["KERAS_BACKEND"] = KERAS_ON
    _site = [each for each in sys.path if each not in _python_path() and each != os.path.dirname(__file__)]
    for name in FRAMEWORKS[framework]:
        with contextlib.suppress(ImportError):  # a program that needs the module will raise the error
            importlib.import_module(name)
    # A process that is forked during another thread's first HMAC waits for a lock of OpenSSL for ever in its own.
    hmac.digest(b"", b"", "sha256")
    _staying = frozenset(name.partition(".")[0] for name in sys.modules) - {"farandole", "helpers", "__main__"}
    gc.collect()
    gc.freeze()
    _fork_children()


def become(program: Program, keep: Sequence[int] = ()) -> NoReturn:
    """Turn this forked process into `program`. Close the descriptors that exec closes, and with `keep` all others."""
    code = 1
    try:
        _show(program)
        _close_descriptors(keep)
        _reset()
        code = _outcome(program)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _room() -> list[tuple[int, int]]:
    """Return the addresses (start, end) of the command line and the environment that the kernel shows."""
    with open("/proc/self/stat", encoding="utf-8") as file:
        fields = file.read().rpartition(")")[2].split()  # fields from the third on
    numbers = [int(field) for field in fields[45:49]]  # arg_start, arg_end, env_start, env_end: see proc_pid_stat(5)
    return [(numbers[0], numbers[1]), (numbers[2], numbers[3])]


def _block(env: Mapping[str, str]) -> bytes:
    return b"".join(os.fsencode(name) + b"=" + os.fsencode(value) + b"\0" for name, value in env.items())


def _show(program: Program) -> None:
    """Make /proc show the program's own command line and environment, by which tests find processes."""
    line = b"".join(os.fsencode(word) + b"\0" for word in program.words())
    for (start, end), text in zip(_room(), (line, _block(os.environ)), strict=True):
        ctypes.memmove(start, text[: end - start].ljust(end - start, b"\0"), end - start)


def _outcome(program: Program) -> int:
    """Run the program to its end; return its exit code."""
    code = 0
    try:
        program.run()
    except SystemExit as end:
        code = _code_of(end)
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        code = 1
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does at its end
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _code_of(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _close_descriptors(keep: Sequence[int]) -> None:
    """Close the descriptors that an exec closes; if `keep` is given, all that are not in it."""
    for entry in os.listdir("/proc/self/fd"):
        number = int(entry)
        with contextlib.suppress(OSError):  # the listing's own descriptor
            if number > 2 and (number not in keep if keep else not os.get_inheritable(number)):
                os.close(number)


def _reset() -> None:
    """Reset the interpreter: modules, exit functions, signals, streams, path, random numbers."""
    global _staying
    if os.environ.get("KERAS_BACKEND", KERAS_ON) != KERAS_ON:
        _staying -= {"keras"}
    _frozen_importlib._module_locks.clear()  # type: ignore[attr-defined]  # including locks of the parent's threads
    for name, module in list(sys.modules.items()):
        unfinished = getattr(getattr(module, "__spec__", None), "_initializing", False)
        # A second import of the extension would lack the types that the first one registered in this process.
        once = name == "farandole._native"
        stays = once or name.partition(".")[0] in _staying or name == "__main__" or module is _THIS
        if unfinished or not stays:
            del sys.modules[name]
    _staying -= STATEFUL
    importlib.invalidate_caches()
    atexit._clear()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError):  # SIGKILL, SIGSTOP and signals of libc
            if signal.getsignal(number) not in (signal.SIG_IGN, signal.SIG_DFL):
                signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_IGN)
    raw = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  for the whole program
    sys.stdout, sys.stderr = _stream(1, raw), _stream(2, raw)
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    sys.path[:] = [*_python_path(), *_site]
    sys.excepthook = sys.__excepthook__
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _stream(number: int, raw: bool) -> io.TextIOWrapper:
    errors = "backslashreplace" if number == 2 else "strict"
    buffer = io.FileIO(number, "w", closefd=False)
    inner: Any = buffer if raw else io.BufferedWriter(buffer)
    return io.TextIOWrapper(inner, "utf-8", errors, write_through=raw, line_buffering=number == 2)


def _python_path() -> list[str]:
    return [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]


def _fork_children() -> None:
    """Make this process, and those forked from it, fork their Python children where that is safe."""
    original = subprocess.Popen.__init__

    def start(self: "subprocess.Popen[bytes]", args: Any, *rest: Any, **options: Any) -> None:
        program = None if isinstance(args, (str, bytes, os.PathLike)) else Program.of(args)
        if program is not None and not rest and not (options.keys() & {"preexec_fn", "executable", "shell"}):
            env, keep = options.get("env"), (0, 1, 2, *options.get("pass_fds", ()))
            if options.get("close_fds", True) and _may_fork(os.environ if env is None else env):
                options["preexec_fn"] = _becoming(program, env, keep)
        original(self, args, *rest, **options)

    subprocess.Popen.__init__ = start  # type: ignore[method-assign, assignment]
    os.execvp = _execvp  # type: ignore[assignment]


def _becoming(program: Program, env: Mapping[str, str] | None, keep: Sequence[int]) -> Callable[[], NoReturn]:
    def turn() -> NoReturn:
        if env is not None:
            os.environ.clear()
            os.environ.update({os.fsdecode(name): os.fsdecode(value) for name, value in env.items()})
        become(program, keep)

    return turn


def _execvp(file: str, args: Sequence[str]) -> NoReturn:
    program = Program.of([file, *args[1:]])
    if program is not None and _may_fork(os.environ):
        become(program)
    _exec(file, list(args))


def _may_fork(env: Mapping[str, str]) -> bool:
    """Return whether a fork can replace an exec.

    It can without foreign threads and without variables that Python reads at its start, and if /proc has room for
    the variables."""
    start, end = _room()[1]
    if len(os.listdir("/proc/self/task")) > threading.active_count() or len(_block(env)) > end - start:
        return False
    return not env.get("PYTHONWARNINGS") and not any(
        os.path.exists(os.path.join(folder, "sitecustomize.py")) for folder in env.get("PYTHONPATH", "").split(":")
    )


def _is_this_python(word: str) -> bool:
    path = shutil.which(word)
    if path is None or not os.path.basename(path).startswith("python"):
        return False
    folder = os.path.dirname(sys.executable)  # both may be links to an interpreter that other environments use as well
    return os.path.samefile(os.path.dirname(path), folder) and os.path.samefile(path, sys.executable)


_THIS = sys.modules[__name__]
