"""Pickling of calls for ranks: size and globals of a function, and the path to a part that cannot be pickled."""

import dis
import functools
import io
import pickle
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farandole.errors import PicklingError, RankFailed

MOST_ATTEMPTS = 2000  # parts to test before the search returns the part found so far


@dataclass(frozen=True, kw_only=True, slots=True)
class PickleReport:
    """A pickled function: its size in bytes and the global names that it reads or writes."""

    size: int
    globals: tuple[str, ...]


def describe(fn: Callable[..., object], pickled: bytes) -> PickleReport:
    """Return the report on `fn`, whose pickle for the ranks is `pickled`."""
    return PickleReport(size=len(pickled), globals=global_names(fn))


def dump_call(fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> bytes:
    """Pickle a call for the ranks' workers.

    Raises `TypeError` if `fn` cannot be called, `PicklingError` naming the part that cannot be pickled."""
    if not callable(fn):
        raise TypeError(f"ranks run a function, got {fn!r}")
    try:
        return dumps((fn, tuple(args), dict(kwargs)))
    except Exception as error:
        for what, part in ((_name(fn), fn), ("args", tuple(args)), ("kwargs", dict(kwargs))):
            found = find_unpicklable(part, what)
            if found is not None:
                raise PicklingError(what, *found) from error
        raise PicklingError(_name(fn), "the call as a whole", _why(error)) from error


def dump(value: object, name: str) -> bytes:
    """Pickle `value`; raises `PicklingError` with the path, from `name`, to the part that cannot be pickled."""
    try:
        return dumps(value)
    except Exception as error:
        raise PicklingError(name, *(find_unpicklable(value, name) or (name, _why(error)))) from error


def load_value(rank: int, data: bytes) -> Any:
    """Unpickle the value that the function has returned on `rank`; raises `RankFailed` if that is not possible here."""
    try:
        return pickle.loads(data)
    except Exception as error:
        raise RankFailed(rank, f"returned a value that cannot be unpickled here ({_why(error)})") from error


def global_names(fn: Callable[..., object]) -> tuple[str, ...]:
    """Return the globals that `fn`, or a function within it, reads or writes, without builtins."""
    function = _unwrapped(fn)
    if function is None:
        return ()
    names = set(_global_operands(function.__code__))
    builtins = function.__globals__.get("__builtins__", {})
    known = builtins if isinstance(builtins, dict) else vars(builtins)
    return tuple(sorted(name for name in names if name in function.__globals__ or name not in known))


def find_unpicklable(value: object, name: str) -> tuple[str, str] | None:
    """Find the innermost part of `value` that cannot be pickled: its path, starting with `name`, and the reason.

    Returns None when `value` can be pickled. Takes time in proportion to its size: for failure reports only."""
    why = _why_unpicklable(value)
    if why is None:
        return None
    attempts = 0
    path, seen = name, {id(value)}
    while True:
        for step, part in _parts(value):
            attempts += 1
            if attempts > MOST_ATTEMPTS:
                return path, why
            if id(part) in seen:
                continue
            problem = _why_unpicklable(part)
            if problem is not None:
                seen.add(id(part))
                value, path, why = part, _join(path, step), problem
                break
        else:
            return path, why


def dumps(value: object) -> bytes:
    """Pickle `value`, with objects of `__main__` by value; raises the exception of the part that cannot be pickled."""
    import cloudpickle  # here, as `farandole run` starts without it

    data: bytes = cloudpickle.dumps(value)
    return data


def _why_unpicklable(value: object) -> str | None:
    """Return why `value` cannot be pickled, or None; the pickled bytes are dropped."""
    import cloudpickle  # here, as in `dumps`

    try:
        cloudpickle.Pickler(_Nowhere()).dump(value)
    except Exception as error:
        return _why(error)
    return None


class _Nowhere(io.RawIOBase):
    """Drops all bytes, so that pickling a large object costs no memory."""

    def write(self, data: object) -> int:
        return len(memoryview(data))  # type: ignore[arg-type]


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _name(fn: Callable[..., object]) -> str:
    function = _unwrapped(fn)
    return function.__name__ if function is not None else type(fn).__name__


def _unwrapped(fn: object) -> types.FunctionType | None:
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, types.MethodType):
        fn = fn.__func__
    return fn if isinstance(fn, types.FunctionType) else None


def _global_operands(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"):
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_operands(constant)


def _join(path: str, step: str) -> str:
    return f"{path}{step}" if step[0] in ".[" else f"{path}'s {step}"


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """Yield the objects that are pickled with `value`, each with its step in the path."""
    if isinstance(value, types.FunctionType):
        yield from _function_parts(value)
    elif isinstance(value, types.MethodType):
        yield "object", value.__self__
        yield "function", value.__func__
    elif isinstance(value, functools.partial):
        yield ".func", value.func
        yield ".args", value.args
        yield ".keywords", value.keywords
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield f"key {key!r}", key
            yield f"[{key!r}]", item
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield f"[{index}]", item
    elif isinstance(value, (set, frozenset)):
        for item in value:
            yield f"member {item!r}", item
    elif isinstance(value, type):
        for name, item in vars(value).items():
            if name not in ("__dict__", "__weakref__") and not name.startswith("_abc_"):  # cloudpickle leaves these out
                yield f".{name}", item
    else:
        yield from _state_parts(value)


def _function_parts(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"closure variable '{name}'", cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    for name in sorted(set(_global_operands(function.__code__))):
        if name in function.__globals__:
            yield f"global '{name}'", function.__globals__[name]
    code = function.__code__
    arguments = code.co_varnames[: code.co_argcount]
    for name, default in zip(reversed(arguments), reversed(function.__defaults__ or ()), strict=False):
        yield f"default for '{name}'", default
    for name, default in (function.__kwdefaults__ or {}).items():
        yield f"default for '{name}'", default
    for name, item in vars(function).items():
        yield f".{name}", item


def _state_parts(value: object) -> Iterator[tuple[str, object]]:
    """Yield the attributes that `__reduce_ex__` of `value` adds to its pickle."""
    try:
        reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    except Exception:
        return  # the object itself cannot be pickled
    if not isinstance(reduced, tuple):
        return
    state = reduced[2] if len(reduced) > 2 else None
    states = state if isinstance(state, tuple) else (state,)
    for each in states:
        if isinstance(each, dict):
            for name, item in each.items():
                yield f".{name}", item
        elif each is not None:
            yield "state", each
    for index, argument in enumerate(reduced[1]):
        if not isinstance(argument, type):
            yield f"constructor argument {index}", argument
