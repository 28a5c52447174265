"""Base of distributed optimizers: a class in front of the user's optimizer class."""

from collections.abc import Hashable
from typing import TypeVar

from farandole.keras.backend import Optimizer, Variable
from farandole.keras.exchange import Exchange

F = TypeVar("F", bound="Front")


class Front:
    """The class in front; the result is still an optimizer of the user's class."""

    _exchange: Exchange  # an attribute of the class, because each optimizer has its own class

    # Keras saves an optimizer by the name of its __class__. As the user's class, it loads without farandole.
    @property  # type: ignore[misc]  # it is never assigned
    def __class__(self) -> type:
        return type(self).__bases__[1]

    def register_local_var(self, var: Variable) -> None:
        """Exclude the gradient of `var` from the reduction; raises `ValueError` with `global_clipnorm`."""
        given = getattr(self, "inner_optimizer", self)
        # A MultiOptimizer of Keras clips nothing itself: the optimizer that it chooses for `var` does.
        choose = getattr(given, "_optimizer_map", None)
        if getattr(given if choose is None else choose(var), "global_clipnorm", None):
            raise ValueError(
                "global_clipnorm and local variables do not go together: the norm would contain gradients of this rank "
                "alone, so that ranks would take different steps; use clipnorm or clipvalue"
            )
        self._exchange.local.add(self._key_of(var))

    @classmethod
    def from_config(cls, config: dict[str, object], *args: object, **kwargs: object) -> Optimizer:
        """Make an optimizer of the user's class with `config`, distributed with the same options as this one.

        Its local variables are not copied."""
        base: type[Optimizer] = cls.__bases__[1]
        return cls._wrap_another(base.from_config(config, *args, **kwargs))

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """Raise `TypeError`, because a copy or pickle would silently train alone."""
        raise TypeError(
            f"a distributed {type(self).__name__} belongs to this rank and its job, and cannot be copied or pickled; "
            "save the model, and load it with farandole.keras.load_model"
        )

    def __deepcopy__(self, memo: object) -> object:
        return self.__reduce_ex__(memo)

    def _key_of(self, variable: Variable) -> Hashable:
        """Return the key of the gradient of `variable`."""
        raise NotImplementedError

    @classmethod
    def _wrap_another(cls, optimizer: Optimizer) -> Optimizer:
        """Return `optimizer`, distributed with the options of this class."""
        raise NotImplementedError


def mix_in(front: type[F], optimizer: Optimizer, exchange: Exchange, **attributes: object) -> F:
    """Return an optimizer of a subclass of `optimizer`'s class with `front` before it; both share all attributes.

    `attributes` are additional attributes of the subclass."""
    base = type(optimizer)
    names = {"__module__": base.__module__, "__doc__": base.__doc__, "_exchange": exchange, **attributes}
    made: type[F] = type(base.__name__, (front, base), names)
    wrapped = made.__new__(made)
    # This avoids Keras' own __setattr__, which would track the variables again. Both optimizers share one namespace,
    # because other objects, such as the loss scaler of Keras 2, keep a reference to the original optimizer.
    object.__setattr__(wrapped, "__dict__", vars(optimizer))
    return wrapped
