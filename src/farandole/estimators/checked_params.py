"""Parameters of estimators: each is declared once, with its check, default, documentation and accessors."""

import difflib
import inspect
import logging
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import (
    TYPE_CHECKING,
    ClassVar,
    Final,
    Generic,
    Protocol,
    TypeVar,
    cast,
    dataclass_transform,
    get_args,
    overload,
)

from pyspark.ml.param import Param, Params

from farandole.errors import ConfigError
from farandole.estimators.checks import Refused
from farandole.refusals import IGNORED_PARAMS

log = logging.getLogger(__name__)

In = TypeVar("In")
InContra = TypeVar("InContra", contravariant=True)
Out = TypeVar("Out")
OutCo = TypeVar("OutCo", covariant=True)
P = TypeVar("P")

_UNDEFINED: Final = object()


class Parameter(Param[Out], Generic[In, Out]):
    """A parameter that takes values of the type `In` and returns them as `Out`.

    Declared in the body of a subclass of `CheckedParams`, with its types, as its constructor takes it:
    `epochs: Parameter[int, int] = Parameter("number of epochs", at_least(1), default=1)`. `check` converts a value and
    raises `Refused` for a wrong one. Without `default` the parameter is not defined until it is set.
    """

    if TYPE_CHECKING:
        # Type checkers take the type of a constructor's argument from here, as for the fields of a dataclass.
        def __set__(self, owner: object, value: In | None) -> None: ...

    def __init__(self, doc: str, check: Callable[[object], Out], default: object = _UNDEFINED) -> None:
        super().__init__(Params._dummy(), "", doc, typeConverter=self.checked)
        self._check, self.has_default = check, default is not _UNDEFINED
        self.default = default if self.has_default else None

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.types = get_args(inspect.get_annotations(owner).get(name))  # `In` and `Out`

    def checked(self, value: object) -> Out:
        """Return the value in its final type; raises `ConfigError`, which names the parameter, for a wrong one."""
        try:
            return self._check(value)
        except Refused as refused:
            raise ConfigError(self.name, str(refused)) from None


class _Setter(Protocol[InContra]):
    def __get__(self, owner: P, kind: type[P] | None = None) -> Callable[[InContra], P]: ...


class _OptionalSetter(Protocol[InContra]):
    def __get__(self, owner: P, kind: type[P] | None = None) -> Callable[[InContra | None], P]: ...


class _Getter(Protocol[OutCo]):
    def __get__(self, owner: object, kind: type | None = None) -> Callable[[], OutCo]: ...


class _OptionalGetter(Protocol[OutCo]):
    def __get__(self, owner: object, kind: type | None = None) -> Callable[[], OutCo | None]: ...


def required(parameter: Parameter[In, Out]) -> tuple[_Setter[In], _Getter[Out]]:
    """Return a setter and a getter, which raises `ConfigError` if there is no value."""

    def get(self: CheckedParams) -> Out:
        return self._required(_of(self, parameter))

    return setter(parameter), cast(_Getter[Out], _accessor(get, parameter))


@overload
def optional(parameter: Parameter[In, Out]) -> tuple[_OptionalSetter[In], _OptionalGetter[Out]]: ...
@overload
def optional(
    parameter: Parameter[In, Out], otherwise: Callable[[], Out]
) -> tuple[_OptionalSetter[In], _Getter[Out]]: ...
def optional(parameter: Parameter[In, Out], otherwise: Callable[[], Out | None] = lambda: None) -> object:
    """Return a setter and a getter, which returns `otherwise()`, by default None, if there is no value."""

    def get(self: CheckedParams) -> Out | None:
        value = self._value(_of(self, parameter))
        return otherwise() if value is None else value

    return setter(parameter), _accessor(get, parameter)


def setter(parameter: Parameter[In, Out]) -> _Setter[In]:
    """Return a setter, which returns the object, so that calls can be chained."""

    def set_(self: CheckedParams, value: In) -> CheckedParams:
        return self._set(**{parameter.name: value})

    return cast(_Setter[In], _accessor(set_, parameter))


def _accessor(function: Callable[..., object], parameter: Parameter[In, Out]) -> object:
    function.__doc__ = f"{parameter.doc[0].upper()}{parameter.doc[1:]}."
    vars(function)["parameter"] = parameter
    return function


def _name_accessor(kind: type, name: str, function: FunctionType) -> None:
    """Give an accessor the name, module and types that a method in the body of `kind` would have."""
    function.__name__, function.__qualname__, function.__module__ = name, f"{kind.__qualname__}.{name}", kind.__module__
    taken, returned = vars(function)["parameter"].types
    function.__annotations__ = {"value": taken, "return": kind} if name.startswith("set") else {"return": returned}


def _of(owner: "CheckedParams", parameter: Parameter[In, Out]) -> "Param[Out]":
    """Return the owner's parameter; a subclass may have declared another one of this name."""
    own: Param[Out] = getattr(owner, parameter.name)
    return own


@dataclass_transform(kw_only_default=True, eq_default=False)
class CheckedParams(Params):
    """Base of classes with `Parameter`s, whose constructor takes each by name.

    Type checkers know the constructor's arguments from the declarations, as of a dataclass; `inspect.signature` and the
    class's documentation list them with their defaults. Values are checked when they are set and when they are read.
    """

    __signature__: ClassVar[inspect.Signature]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, each in vars(cls).items():
            if isinstance(each, FunctionType) and each.__module__ == __name__:
                _name_accessor(cls, name, each)
        if cls.__init__ is CheckedParams.__init__:
            cls.__signature__ = _signature(cls)
        else:
            own = inspect.signature(cls.__init__)
            cls.__signature__ = own.replace(parameters=list(own.parameters.values())[1:])
        if cls.__doc__:
            rows = [f"* `{name}`: {_described(each)}" for name, each in sorted(_declared(cls).items())]
            cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__), "", "Parameters:", "", *rows, ""])

    def __init__(self, **given: object) -> None:
        """Set parameters by name. Raises `ConfigError` for wrong values and unknown names.

        None leaves a parameter as it is. Parameters of horovod.spark without an effect are ignored, with a warning."""
        super().__init__()
        declared = _declared(type(self))
        self._setDefault(**{name: each.default for name, each in declared.items() if each.has_default})
        given = {name: value for name, value in given.items() if value is not None}
        self._set(**{name: value for name, value in given.items() if self.hasParam(name)})
        self._take_others({name: value for name, value in given.items() if not self.hasParam(name)})

    def _take_others(self, others: Mapping[str, object]) -> None:
        """Log a warning for arguments without an effect; raise one `ConfigError` that names all unknown ones."""
        known, names = sorted(_declared(type(self))), sorted(others)
        ignored = [name for name in names if name in IGNORED_PARAMS and name not in known]
        unknown = [name for name in names if name not in ignored]
        if unknown:
            near = [difflib.get_close_matches(name, known, 1) for name in unknown]
            meant = [each[0] for each in near if each]
            hint = f"did you mean {', '.join(meant)}? " if meant else ""
            raise ConfigError(", ".join(unknown), f"no such parameter; {hint}the parameters are {', '.join(known)}")
        if ignored:
            reasons = "; ".join(f"{name} ({IGNORED_PARAMS[name]})" for name in ignored)
            log.warning("these parameters have no effect: %s", reasons)

    def _value(self, param: "Param[Out]") -> Out | None:
        # fit(df, {param: value}) bypasses the setters, so its values are checked here.
        if not self.isDefined(param):
            return None
        value = self.getOrDefault(param)
        return None if value is None else param.typeConverter(value)

    def _required(self, param: "Param[Out]") -> Out:
        value = self._value(param)
        if value is None:
            raise ConfigError(param.name, f"is not set: {param.doc}")
        return value


def _declared(kind: type) -> dict[str, Parameter[object, object]]:
    """Return the parameters of a class by name, its own before those of its bases."""
    found: dict[str, Parameter[object, object]] = {}
    for each in kind.__mro__:
        own = {name: value for name, value in vars(each).items() if isinstance(value, Parameter)}
        found = {**found, **{name: value for name, value in own.items() if name not in found}}
    return found


def _described(parameter: Parameter[object, object]) -> str:
    # Most descriptions name the default of parameters that have none here, such as "one per slot of Spark".
    return parameter.doc if parameter.default is None else f"{parameter.doc}; default: {parameter.default!r}"


def _signature(kind: type) -> inspect.Signature:
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.types[0] | None)
        for name, each in _declared(kind).items()
    ]
    others = inspect.Parameter("others", inspect.Parameter.VAR_KEYWORD, annotation=object)
    return inspect.Signature([*named, others], return_annotation=None)
