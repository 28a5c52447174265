"""Decisions of a distributed optimizer, for any framework: names, groups, and when to reduce a gradient. Pure."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, TypeVar

from farandole.core.operations.compression import Compressor, NoneCompressor, wire_op
from farandole.core.operations.reduction import Average, Reduction, choose_reduction
from farandole.core.process_sets.process_set import ProcessSet, global_process_set

P = TypeVar("P", bound=Hashable)
T = TypeVar("T")

_AVERAGE = Reduction(Average)


# A generic dataclass that is frozen and has slots cannot be called as `GradientOptions[T](...)` on Python 3.11.
@dataclass(frozen=True, kw_only=True)
class GradientOptions(Generic[T]):
    """How gradients are reduced, and over which ranks."""

    reduction: Reduction = _AVERAGE
    compression: Compressor[T] = field(default_factory=NoneCompressor)
    sparse_as_dense: bool = False
    process_set: ProcessSet = global_process_set

    def __post_init__(self) -> None:
        """Raise `UnsupportedReduction` for int8 with operators other than Average and Sum."""
        wire_op(self.compression, self.reduction.op, "gradients")

    @property
    def sent(self) -> Reduction:
        """The reduction that the engine gets."""
        return self.reduction._replace(op=wire_op(self.compression, self.reduction.op, "gradients"))


def predivided(op: int, predivide: float) -> Reduction:
    """Return a reduction by `op` that divides by `predivide` before and multiplies after, to keep half floats in range.

    Raises `ValueError` if `op` is not Average and `predivide` is not 1, and for a factor that is not positive.
    """
    reduction = choose_reduction(op)
    if predivide == 1.0:
        return reduction
    if op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if not predivide > 0:
        raise ValueError(f"gradient_predivide_factor must be > 0, got {predivide}")
    return Reduction(op, 1.0 / predivide, predivide)


def name_of_absent(gradients: Sequence[object | None]) -> str:
    """Return the end of a request's name that lists the places of absent gradients: ".without.0.3", or ""."""
    absent = [str(place) for place, gradient in enumerate(gradients) if gradient is None]
    return f".without.{'.'.join(absent)}" if absent else ""


def name_parameters(
    groups: Sequence[Sequence[P]], named: Iterable[tuple[str, P]] | None, shown: str = "named_parameters"
) -> dict[P, str]:
    """Return a name, equal on all ranks, for each parameter of an optimizer's groups.

    Raises `ValueError` if `named` holds anything but (name, parameter) pairs, holds a name twice, or lacks a parameter.
    Without `named`, or with an empty one, names are made of the parameters' indexes. Parameters that are only in
    `named` are left out, because several optimizers may share one model. Errors call the argument `shown`.
    """
    pairs = list(named) if named is not None else []
    if any(not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str) for pair in pairs):
        raise ValueError(f"{shown} should be a sequence of tuples (name, parameter), as model.named_parameters() is")
    twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if twice:
        raise ValueError(f"Parameter names in {shown} must be unique. Found duplicates: {', '.join(twice)}")
    names = {parameter: name for name, parameter in pairs}
    if not names:
        return {
            parameter: f"allreduce.noname.{place}.{index}"
            for place, group in enumerate(groups)
            for index, parameter in enumerate(group)
        }
    unnamed = sum(parameter not in names for group in groups for parameter in group)
    if unnamed:
        raise ValueError(
            f"{shown} was specified, but {unnamed} model parameters were not named. Name all parameters that the "
            "optimizer holds, or leave it out"
        )
    return {parameter: names[parameter] for group in groups for parameter in group}


def even_groups(parameters: Sequence[P], count: int) -> list[list[P]]:
    """Divide parameters, in order, into at most `count` groups whose lengths differ by at most one."""
    if count <= 0:
        raise ValueError(f"groups should be a positive integer or a list of lists of parameters, got {count}")
    count = min(count, len(parameters))
    cuts = [place * len(parameters) // count for place in range(count + 1)] if count else []
    return [list(parameters[start:stop]) for start, stop in pairwise(cuts)]


def explicit_groups(parameters: Sequence[P], groups: Iterable[Iterable[P]]) -> list[list[P]]:
    """Return the user's groups, and a group for each parameter that is in none of them.

    Parameters that are not in `parameters` are left out, because they are not trained. Raises `ValueError` for a
    parameter in two groups.
    """
    known = set(parameters)
    chosen = [list(group) for group in groups]
    counts = Counter(parameter for group in chosen for parameter in group)
    if any(count > 1 for count in counts.values()):
        raise ValueError("groups must not hold a parameter more than once")
    kept = [[parameter for parameter in group if parameter in known] for group in chosen]
    alone = [[parameter] for parameter in parameters if parameter not in counts]
    return [group for group in kept if group] + alone


class Passes(Generic[P]):
    """Counter of backward passes per parameter, which decides when the gradients of a group are due.

    Call `add` when a gradient has accumulated, and reduce the parameters that it returns together.
    """

    def __init__(self, groups: Sequence[Sequence[P]], per_step: int) -> None:
        if per_step <= 0:
            raise ValueError(f"backward_passes_per_step must be > 0, got {per_step}")
        self.per_step = per_step
        self._members = [tuple(group) for group in groups]
        self._group = {parameter: index for index, group in enumerate(groups) for parameter in group}
        self.reset()

    def reset(self) -> None:
        """Reset all counts for the next step."""
        self._done: dict[P, int] = {}
        self._complete = [0] * len(self._members)
        self._due: set[int] = set()

    def leave_out(self, parameters: Iterable[P]) -> None:
        """Let the groups of `parameters` be due without them in this step, in which they get no gradient."""
        for parameter in parameters:
            self._complete[self._group[parameter]] += 1

    @property
    def started(self) -> bool:
        """Return whether a gradient was counted, or a group became due, since the last `reset`."""
        return bool(self._done) or bool(self._due)

    @property
    def all_due(self) -> bool:
        """Return whether every group became due since the last `reset`."""
        return len(self._due) == len(self._members)

    def add(self, parameter: P) -> tuple[P, ...]:
        """Count one pass, and return the parameters of the group if it is due now, else ().

        Raises `AssertionError` if `step` should have been called before this pass."""
        group = self._group[parameter]
        done = self._done.get(parameter, 0) + 1
        if done > self.per_step or group in self._due:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self._done[parameter] = done
        if done < self.per_step:
            return ()
        self._complete[group] += 1
        if self._complete[group] < len(self._members[group]):
            return ()
        self._due.add(group)
        return self._members[group]

    def complete(self, parameter: P) -> bool:
        """Return whether all passes of `parameter` were counted."""
        return self._done.get(parameter, 0) >= self.per_step

    def rest(self, parameters: Iterable[P]) -> list[tuple[P, ...]]:
        """Return the groups of `parameters` that were not due yet, and make them due: the step cannot wait for them."""
        groups = [
            group
            for group in dict.fromkeys(self._group[parameter] for parameter in parameters)
            if group not in self._due
        ]
        self._due.update(groups)
        return [self._members[group] for group in groups]
