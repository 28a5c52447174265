"""Pickling of ranks' exceptions for the process that raises them again."""

import pickle
from dataclasses import dataclass

from farandole.launch.pickling import dumps

_NOTE = "Made of its args and attributes: it cannot be pickled as a whole"
LARGEST_EXCEPTION = 1 << 20  # bytes; a larger exception, such as one that holds a data set, is sent as text only


@dataclass(frozen=True, slots=True)
class _Absent:
    """Stand-in for an exception that cannot be sent."""

    why: str


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of an exception whose class cannot unpickle it, as is common with an `__init__` of its own."""

    kind: type[BaseException]
    args: tuple[object, ...]
    attributes: dict[str, object]
    why: str
    left_out: tuple[str, ...]

    def put_together(self) -> BaseException:
        error = self.kind.__new__(self.kind)
        error.args = self.args
        vars(error).update(self.attributes)
        if any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
            return error  # a process in between has put it together from parts before
        left_out = f" Left out, as they cannot be pickled: {', '.join(self.left_out)}." if self.left_out else ""
        error.add_note(f"{_NOTE} ({self.why}).{left_out}")
        return error


def dump_exception(error: BaseException) -> bytes:
    """Pickle `error`; else its class, args and attributes; else the reason why these cannot be pickled."""
    try:
        data = dumps(error)
        whole = isinstance(pickle.loads(data), type(error))
        why = "its class makes another object of it"
    except Exception as problem:
        whole, why = False, f"{type(problem).__name__}: {problem}"
    if not whole:
        parts = {name: value for name, value in vars(error).items() if _survives_pickling(value)}
        args = tuple(each if _survives_pickling(each) else repr(each) for each in error.args)
        left_out = tuple(name for name in vars(error) if name not in parts)
        try:
            data = dumps(_Parts(type(error), args, parts, why, left_out))
            pickle.loads(data).put_together()
        except Exception:
            return pickle.dumps(_Absent(f"{type(error).__qualname__} cannot be pickled ({why})"))
    if len(data) > LARGEST_EXCEPTION:
        return pickle.dumps(_Absent(f"{type(error).__qualname__} is larger than {LARGEST_EXCEPTION >> 20} MiB"))
    return data


def load_exception(data: bytes) -> tuple[BaseException | None, str]:
    """Return the exception in `data`, or None and the reason why it is missing; the reason is empty without data."""
    if not data:
        return None, ""
    try:
        loaded = pickle.loads(data)
        error = loaded.put_together() if isinstance(loaded, _Parts) else loaded
    except Exception as problem:  # its class may be in a module that only the rank's host has
        return None, f"it cannot be unpickled here ({type(problem).__name__}: {problem})"
    if isinstance(error, _Absent):
        return None, error.why
    return error, ""


def _survives_pickling(value: object) -> bool:
    try:
        pickle.loads(dumps(value))
    except Exception:
        return False
    return True
