"""Import hook that makes the modules of Horovod, sparkdl and Petastorm from the table in `answers`."""

import contextlib
import importlib
import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec, spec_from_file_location
from types import ModuleType

import farandole
from farandole.compat import absent, answers
from farandole.compat.answers import IMPORTABLE, MODULES, PACKAGES
from farandole.compat.speech import Speech
from farandole.errors import ConfigError
from farandole.extras import prepare_mxnet

INSTALLER = "farandole"  # of the packages that `farandole as-horovod` makes

log = logging.getLogger(__name__)


def install() -> None:
    """Module `import horovod...`, `import sparkdl...` and `import petastorm...` in this process from now on.

    farandole's errors then begin with the sentences that Horovod's programs look for. Processes that inherit `sys.path`
    (ranks of `farandole.run`, workers of `multiprocessing`) answer these imports too. A second call does nothing.
    An installed Horovod is hidden, with a warning. Raises `ConfigError` if it has been imported already."""
    if _installed() is not None:
        return
    for package in PACKAGES:
        found = sys.modules.get(package)
        if found is not None:
            raise ConfigError(
                "compat",
                f"{package} has been imported already, from {getattr(found, '__file__', None) or 'elsewhere'}; "
                "call farandole.compat.install() before the first import of it",
            )
        _warn_of_hidden(package)
    sys.meta_path.insert(0, Finder(listed=str(IMPORTABLE) in sys.path))
    if str(IMPORTABLE) not in sys.path:
        # After the program's own folder, which stays first.
        sys.path.insert(min(1, len(sys.path)), str(IMPORTABLE))


def uninstall() -> None:
    """Undo `install`. References to modules that were imported meanwhile stay usable."""
    finder = _installed()
    if finder is None:
        return
    finder.speech.end()
    sys.meta_path.remove(finder)
    if not finder.listed:
        sys.path.remove(str(IMPORTABLE))
    # With type(), because isinstance reads `__class__` of lazy modules, and so loads them.
    for name in [name for name, module in sys.modules.items() if issubclass(type(module), Answered)]:
        del sys.modules[name]


class Finder(MetaPathFinder):
    """Finder of Horovod's modules, the first in `sys.meta_path` while compat is installed."""

    def __init__(self, listed: bool) -> None:
        self.listed = listed  # `IMPORTABLE` was in sys.path before
        self.speech = Speech()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of Horovod, or one that raises the reason for its absence. None for others."""
        if fullname == "mxnet":  # programs import it before `horovod.mxnet`
            prepare_mxnet()
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        missing = absent.missing_module(fullname)
        if missing is None and fullname not in MODULES:
            return _spec_of_program(fullname)
        spec = ModuleSpec(
            fullname, Maker() if missing is None else _refuser(fullname, missing), origin=answers.__file__
        )
        # Each is a package: Python then looks for a missing name as a submodule, and the finder can explain it.
        spec.submodule_search_locations = []
        spec.has_location = True
        return spec


class Answered(ModuleType):
    """One of Horovod's modules."""

    def __getattr__(self, name: str) -> object:
        """Import a name on first use, or raise `AttributeError` with the reason for its absence."""
        answer = MODULES[self.__name__]
        if name in answer.later.split():
            return importlib.import_module(f"{self.__name__}.{name}")
        where = answer.own.get(name)
        if where is None:
            missing = absent.missing_name(self.__name__, name)
            raise AttributeError(missing or f"module {self.__name__!r} has no attribute {name!r}", name=name, obj=self)
        module, _, attribute = where.partition(":")
        value: object = getattr(importlib.import_module(module), attribute)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        answer = MODULES[self.__name__]
        return sorted({*super().__dir__(), *answer.own, *answer.later.split()})

    def __reduce__(self) -> tuple[object, ...]:
        # A pickled function that refers to this module installs compat where it is unpickled.
        return import_answered, (self.__name__,)


class Maker(Loader):
    """Loader that fills a module with the names of farandole that answer it."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Answered(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        answer = MODULES[module.__name__]
        names = answer.offered()
        ours = importlib.import_module(answer.by) if answer.by else None
        for name in names:
            setattr(module, name, getattr(ours, name))
        module.__doc__ = f"Answered by {answer.by}." if answer.by else "Answered by farandole."
        public = [name for name in answer.own if not name.startswith("_")]
        for part in answer.parts.split():
            if absent.missing_module(f"{module.__name__}.{part}") is None:
                importlib.import_module(f"{module.__name__}.{part}")
                public.append(part)
        vars(module)["__all__"] = sorted({*names, *public})


class Refuser(Loader):
    """Loader that raises the reason for a module's absence."""

    def __init__(self, why: ImportError) -> None:
        self._why = why

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        raise self._why

    def exec_module(self, module: ModuleType) -> None:
        raise self._why


def _spec_of_program(name: str) -> ModuleSpec | None:
    """Return the spec that `python -m` runs for one of Horovod's modules, of which it asks for a `__main__`."""
    module, _, last = name.rpartition(".")
    if last != "__main__" or module not in MODULES or not MODULES[module].program:
        return None
    ours = find_spec(MODULES[module].program)
    assert ours is not None
    return spec_from_file_location(name, ours.origin)


def _refuser(name: str, why: str) -> Refuser:
    package = absent.missing_package(name) if name in MODULES else ""
    return Refuser(ModuleNotFoundError(why, name=package) if package else ImportError(why, name=name))


def import_answered(name: str) -> ModuleType:
    """Install compat in this process if needed, and import one of Horovod's modules."""
    install()
    return importlib.import_module(name)


def _installed() -> Finder | None:
    return next((each for each in sys.meta_path if isinstance(each, Finder)), None)


def is_stand_in(package: Distribution) -> bool:
    """Return whether `farandole as-horovod` has installed a package."""
    return (package.read_text("INSTALLER") or "").strip() == INSTALLER


def _warn_of_hidden(package: str) -> None:
    """Log a warning if another package of this name is on the path."""
    found = PathFinder.find_spec(package, [path for path in sys.path if path != str(IMPORTABLE)])
    if found is None or found.origin is None:
        return  # a plain folder of this name is not a package
    which = package
    with contextlib.suppress(PackageNotFoundError):
        known = distribution(package)
        if is_stand_in(known):
            return
        which = f"{package} {known.version}"
    log.warning(
        "%s is installed (%s) but hidden: farandole %s answers `import %s`; uninstall one of the two",
        which,
        found.origin,
        farandole.__version__,
        package,
    )
