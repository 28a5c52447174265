"""Keys of functions by their code and the values they use, the same in every process."""

import copyreg
import dis
import functools
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import attrgetter
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_PLAIN: set[type] = {type(None), type(...), bool, int, float, complex, str, bytes}
_MAIN = {"__main__", "__mp_main__"}
_INSIDE: dict[type, tuple[str, ...]] = {
    ModuleType: ("__name__",),
    MethodType: ("__func__", "__self__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    functools.cached_property: ("func",),
}


def key_of(function: Callable[..., object]) -> str:
    """Return a digest of a function: of its code, its defaults, and the values that it refers to, functions included.

    Imported functions count with their names, their code, and the plain values and functions of their own modules;
    imported classes with their names. Raises the errors of pickling for a value that cannot be pickled."""
    return _Keys().of(function).hex()


class _Keys:
    """Digests of values. Pickles of sets, and of classes of `__main__`, would differ between processes."""

    def __init__(self) -> None:
        # Digests by object; of an unfinished one, its depth. The objects are held, so that no other one gets their id.
        self._known: dict[tuple[int, bool], tuple[object, bytes]] = {}
        self._depth = 0

    def of(self, value: object, imported: bool = False) -> bytes:
        """Return the digest of `value`; `imported`: as a part of an imported function."""
        if (text := _plain(value)) is not None:
            return _digest([text.encode()])
        if isinstance(value, FunctionType):
            imported = imported or _is_imported(value)
        key = id(value), imported
        if key not in self._known:
            self._known[key] = value, b"depth %d" % self._depth
            self._depth += 1
            self._known[key] = value, _digest(self._parts(value, imported))
            self._depth -= 1
        return self._known[key][1]

    def _parts(self, value: Any, imported: bool) -> Iterable[bytes]:
        """Yield the kind of `value` and the digests of its parts."""
        yield type(value).__name__.encode()
        if isinstance(value, FunctionType):
            yield from self._function(value, imported)
        elif isinstance(value, CodeType):
            yield from self._code(value)
        elif type(value) in _INSIDE:
            yield from (self.of(getattr(value, name)) for name in _INSIDE[type(value)])
        elif isinstance(value, type):
            yield from (_name(value).encode(), *(() if _is_imported(value) else self._class(value)))
        elif type(value) in (list, tuple, dict):
            yield from map(self.of, chain.from_iterable(value.items()) if type(value) is dict else value)
        elif type(value) in (set, frozenset):
            yield from sorted(self._items(value))
        elif _name(type(value)) == "torch.Tensor" and str(value.layout) == "torch.strided":
            yield from (str((value.dtype, value.shape)).encode(), _bytes_of(value))
        elif isinstance(wrapped := getattr(value, "__wrapped__", None), FunctionType):
            yield self.of(wrapped)  # as of functools.cache
        else:
            yield from self._reduced(value)

    def _function(self, function: FunctionType, imported: bool) -> Iterator[bytes]:
        code, known = function.__code__, function.__globals__
        yield from (self.of(code), _name(function).encode() if imported else b"")
        used = {"own defaults": function.__defaults__, "of keywords": function.__kwdefaults__, **vars(function)}
        used |= {f"closure {place}": cell.cell_contents for place, cell in enumerate(function.__closure__ or ())}
        used |= {f"global {name}": known[name] for name in sorted(_globals_of(code)) if name in known}
        for name, value in used.items():
            followed = value if isinstance(value, FunctionType) else getattr(value, "__wrapped__", None)
            if not imported or _plain(value) is not None:
                yield from (name.encode(), self.of(value))
            elif isinstance(followed, FunctionType) and followed.__module__ == function.__module__:
                yield from (name.encode(), self.of(followed, imported=True))

    def _code(self, code: CodeType) -> Iterator[bytes]:
        arguments = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        names = code.co_names, code.co_varnames, code.co_cellvars, code.co_freevars
        yield from map(self.of, (arguments, names, code.co_code, code.co_exceptiontable, code.co_consts))

    def _class(self, kind: type) -> Iterator[bytes]:
        yield from map(self.of, kind.__bases__)
        for name, value in sorted(vars(kind).items()):
            # The others that Python adds hold line numbers, sets, or what cannot be pickled.
            own = not name.startswith("__") and name != "_abc_impl"
            if own or isinstance(value, (FunctionType, classmethod, staticmethod, property)):
                yield from (name.encode(), self.of(value))

    def _items(self, items: Iterable[object]) -> Iterator[bytes]:
        """Yield the digests of a set's items; none depends on those before it, whose order differs."""
        before = self._known
        for each in items:
            self._known = dict(before)
            yield self.of(each)
        self._known = before

    def _reduced(self, value: object) -> Iterator[bytes]:
        reduce = copyreg.dispatch_table.get(type(value))
        made = value.__reduce_ex__(4) if reduce is None else reduce(value)
        made = (getattr(value, "__module__", None), made) if isinstance(made, str) else made  # a global's name
        yield from (self.of(list(each) if isinstance(each, Iterator) else each) for each in made)
        if callable(value) and isinstance(type(value).__call__, FunctionType):
            yield self.of(type(value).__call__)


def _digest(parts: Iterable[bytes]) -> bytes:
    made = hashlib.sha256()
    for part in parts:
        made.update(len(part).to_bytes(8, "big") + part)
    return made.digest()


def _plain(value: object) -> str | None:
    """Return the text of numbers, texts, bytes, and lists, tuples and dictionaries of them; None for other values."""
    items: Iterable[object] = (value,)
    if type(value) is dict:
        items = (*value, *value.values())
    elif type(value) is list or type(value) is tuple:
        items = value
    return repr(value) if set(map(type, items)) <= _PLAIN else None


def _bytes_of(tensor: Any) -> bytes:
    """Return the bytes of a tensor of torch, each of whose pickles has another number."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
    content: bytes = flat.view(sys.modules["torch"].uint8).numpy().tobytes()
    return content


def _name(value: FunctionType | type) -> str:
    return f"{'' if value.__module__ in _MAIN else value.__module__}.{value.__qualname__}"


def _is_imported(value: FunctionType | type) -> bool:
    module = value.__module__
    try:
        return module not in _MAIN and attrgetter(value.__qualname__)(sys.modules[module]) is value
    except (AttributeError, KeyError):
        return False


def _globals_of(code: CodeType) -> set[str]:
    used = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return used.union(*(_globals_of(each) for each in code.co_consts if isinstance(each, CodeType)))
