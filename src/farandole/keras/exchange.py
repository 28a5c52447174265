"""Exchange of one optimizer's gradients with the other ranks."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from weakref import WeakKeyDictionary

import keras

from farandole.core.operations.gradients import even_groups, explicit_groups, name_of_absent
from farandole.core.operations.reduction import Min, Reduction
from farandole.core.process_sets.membership import Counters
from farandole.core.process_sets.process_set import is_alone, membership_of, require_registered
from farandole.keras.backend import Options, Tensor, Variable
from farandole.keras.chosen import backend

Groups = int | Iterable[Iterable[Hashable]] | None


def keyed(groups: int | Iterable[Iterable[Variable]] | None, key_of: Callable[[Variable], Hashable]) -> Groups:
    """Return `groups`, a number or lists of variables, with keys in place of variables."""
    if groups is None or isinstance(groups, int):
        return groups
    return [[key_of(variable) for variable in group] for group in groups]


class Exchange:
    """Reduction of an optimizer's gradients: the gradients to reduce, their groups, and the operations' names.

    A gradient is identified by the key of its variable. `groups` is the number of groups, or lists of keys that are
    reduced together. Gradients of variables in `local` are not reduced. With `scale_local` they are divided by the
    number of ranks, because the variables affect only this rank's share of the averaged loss. With `summed`, gradients
    of several passes are added up and not averaged."""

    def __init__(
        self,
        options: Options,
        *,
        name: str | None = None,
        groups: Groups = None,
        scale_local: bool = True,
        summed: bool = False,
    ) -> None:
        self.options = options
        self.local: set[Hashable] = set()
        self.summed = summed
        # The keys of the current call of `apply`; None in place of those whose gradients Keras does not accumulate.
        self.pending: list[Hashable | None] | None = None
        # True inside an optimizer that checks only the gradients of this rank, such as LossScaleOptimizer.
        self.held_by_another = False
        self._name = name
        self._numbered: WeakKeyDictionary[Counters, str] = WeakKeyDictionary()  # the names in each job
        self._groups, self._scale_local = groups, scale_local

    def again(self) -> "Exchange":
        """Return an exchange with the same options for another optimizer, without local variables."""
        return Exchange(
            self.options,
            name=self._name,
            groups=self._groups,
            scale_local=self._scale_local,
            summed=self.summed,
        )

    @property
    def alone(self) -> bool:
        """Whether this rank has no other ranks to exchange gradients with; `NotInitializedError` before `init()`."""
        require_registered(self.options.process_set, "the optimizer's step")
        return is_alone(self.options.process_set)

    def reduce(self, gradients: Sequence[Tensor], keys: Sequence[Hashable]) -> list[Tensor]:
        """Return the gradients, reduced over all ranks; None stays None.

        Blocks until every rank has made the request, unless it is only traced. A function traced while `alone` reduces
        nothing, so that XLA can compile it, and a traced function keeps the operations' names. Another job has to trace
        it again. An elastic job goes on with it, but on JAX it keeps the number of ranks for local variables."""
        reduced = list(gradients)
        if self.alone:
            return reduced
        sent: dict[Hashable, int] = {}
        for place, (gradient, key) in enumerate(zip(gradients, keys, strict=True)):
            if gradient is None:
                continue
            if key not in self.local:
                # A variable may be given twice, such as one that two models share.
                sent[(key, place) if key in sent else key] = place
            elif self._scale_local:
                reduced[place] = backend().divide(gradient, self.options.process_set)
        if sent:
            # Ranks that lack different gradients must not match each other's requests.
            name = self._named() + name_of_absent(gradients)
            outputs = backend().reduce_each(
                [gradients[place] for place in sent.values()], self._places(list(sent)), name, self.options
            )
            for place, output in zip(sent.values(), outputs, strict=True):
                reduced[place] = output
        return reduced

    def agree(self, flag: Tensor) -> Tensor:
        """Return a boolean tensor: whether `flag` is true on all ranks. Blocks as `reduce` does."""
        if self.alone:
            return flag
        number = keras.ops.reshape(keras.ops.cast(flag, "int32"), (1,))
        options = Options(reduction=Reduction(Min), process_set=self.options.process_set)
        least = backend().allreduce(number, f"{self._named()}.finite", options)
        return keras.ops.cast(keras.ops.reshape(least, ()), "bool")

    def _places(self, keys: list[Hashable]) -> list[list[int]] | None:
        """Return the groups as indexes into `keys`; None if the user gave none."""
        if self._groups is None:
            return None
        chosen = (
            even_groups(keys, self._groups) if isinstance(self._groups, int) else explicit_groups(keys, self._groups)
        )
        place = {key: number for number, key in enumerate(keys)}
        return [[place[key] for key in group] for group in chosen]

    def _named(self) -> str:
        """Return the optimizer's name on the wire: the user's name, or a number in the order of first use in the job.

        Variables' names cannot be used, because they depend on how many layers and optimizers this rank has made."""
        if self._name is not None:
            return self._name
        membership = membership_of(self.options.process_set, "optimizer")
        if membership.counters not in self._numbered:
            self._numbered[membership.counters] = membership.wire_name("optimizer", None)
        return self._numbered[membership.counters]
