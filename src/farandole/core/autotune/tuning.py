"""Search for good knobs: chooses what to try next and judges the samples. Pure; `tuner` takes the samples.

Optuna's tree-structured Parzen estimator (Bergstra et al. 2011) proposes; it is the extra `autotune`."""

import importlib.util
import itertools
import statistics
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

from farandole.config import Config
from farandole.core.autotune.knobs import LARGEST_SLOT, Knobs
from farandole.errors import ConfigError

if TYPE_CHECKING:
    import optuna

__all__ = ["Marks", "Outcome", "Space", "Terms", "Trial", "load_optuna", "score", "search", "space_of"]

# A knob's least and greatest power of two; nothing for a yes or no.
Space: TypeAlias = Mapping[str, tuple[int, int] | None]
Marks: TypeAlias = list[tuple[int, int]]

# Two settings are compared in turns, so that what else the machine does falls on both. Who wins so many of so many
# turns by chance alone is one in fifty; and a smaller gain is not worth a turn.
TURNS, WINS = 9, 8
GAIN = 1.02
FINALISTS = 2  # of the search, that are compared so
REFERENCE_EVERY = 5  # samples of the search, one is of the default


@dataclass(frozen=True, slots=True)
class Trial:
    """The knobs and the purpose of the next sample: "warmup", "search" or "confirm"."""

    phase: str
    knobs: Knobs


@dataclass(frozen=True, slots=True)
class Outcome:
    """The knobs to stay with, and how many times faster than the default ones they were, side by side."""

    knobs: Knobs
    gain: float


@dataclass(frozen=True, slots=True)
class Terms:
    """The length of the search: `warmup` samples that do not count, then `samples`; `seed` is that of its chance."""

    warmup: int
    samples: int
    seed: int = 0


def load_optuna() -> ModuleType:
    """Import what proposes; raises `ConfigError` with the remedy when it is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError("autotune", "needs optuna, which is not installed; pip install farandole[autotune]")
    # Optuna keeps errors of packages that it does not find, with the frames of its first importer and their variables.
    # The frames of a thread of its own hold none of ours.
    with ThreadPoolExecutor(1, thread_name_prefix="farandole-optuna") as thread:
        return thread.submit(importlib.import_module, "optuna").result()


def space_of(config: Config, hosts: int, is_grid: bool, largest_slot: int) -> Space:
    """Return the knobs that are left at their defaults and matter among so many hosts, each with its range."""
    space: dict[str, tuple[int, int] | None] = {"fusion_threshold": (16, 28)}
    if hosts == 1 or is_grid:
        space["slot_bytes"] = (14, min(largest_slot, LARGEST_SLOT).bit_length() - 1)
    if hosts > 1:
        space |= {"link_chunk": (15, 20), "link_small": (12, 18)}
    if is_grid:
        space["hierarchical"] = None
    return {name: room for name, room in space.items() if config.leaves_free(name)}


def score(marks: Marks, steps: int, least_ns: int) -> float | None:
    """Return the bytes per second of the middle one of the steps between `marks` (ns, bytes).

    None while there are fewer than `steps` of them, or they are too short together to be measured."""
    if len(marks) <= steps or marks[-1][0] - marks[0][0] < least_ns:
        return None
    pairs = itertools.pairwise(marks)
    return statistics.median(1e9 * (then - now) / max(1, later - soon) for (soon, now), (later, then) in pairs)


def search(space: Space, default: Knobs, saved: Knobs | None, terms: Terms) -> Generator[Trial, float, Outcome]:
    """Yield what to take a sample with, be sent its score, return what to stay with.

    `saved` is what an earlier job ended with: when it beats `default`, that is all. Else what the search finds has to.
    So noise cannot end worse than `default`, which wins all that is not clear."""
    for _ in range(terms.warmup):
        yield Trial("warmup", saved or default)
    if saved is not None and saved != default:
        gain = yield from _duel(saved, default)
        if gain is not None:
            return Outcome(saved, gain)
    for found in (yield from _explore(space, default, terms))[:FINALISTS]:
        gain = yield from _duel(found, default)
        if gain is not None:
            return Outcome(found, gain)
    return Outcome(default, 1.0)


def _explore(space: Space, default: Knobs, terms: Terms) -> Generator[Trial, float, list[Knobs]]:
    """Sample as often as `terms` say; return what did better than the default, the best first.

    Scores are shares of the latest one of the default: that a machine gets slower says nothing of what is tried."""
    study, distributions = _study(space, terms)
    scores: dict[Knobs, list[float]] = {}
    reference = 1.0
    for number in range(terms.samples):
        first = number == 0
        if number % REFERENCE_EVERY == 0:
            reference = max(1.0, (yield Trial("search", default)))
            if not first:
                continue
            study.enqueue_trial(_parameters(default, space))
        trial = study.ask(distributions)
        knobs = default if first else _knobs(default, space, trial.params)
        share = 1.0 if first else (yield Trial("search", knobs)) / reference
        study.tell(trial, share)
        scores.setdefault(knobs, []).append(share)
    middle = {knobs: statistics.median(shares) for knobs, shares in scores.items() if knobs != default}
    return sorted((knobs for knobs, share in middle.items() if share > 1), key=lambda knobs: -middle[knobs])


def _duel(challenger: Knobs, default: Knobs) -> Generator[Trial, float, float | None]:
    """Compare side by side; return the challenger's gain when it clearly wins, else None, as soon as that is known."""
    ratios: list[float] = []
    for turn in range(TURNS):
        pair = [challenger, default] if turn % 2 == 0 else [default, challenger]
        reached = {}
        for knobs in pair:
            reached[knobs] = yield Trial("confirm", knobs)
        ratios.append(reached[challenger] / reached[default] if reached[default] > 0 else 1.0)
        if sum(ratio <= 1 for ratio in ratios) > TURNS - WINS:
            return None
    gain = statistics.median(ratios)
    return gain if gain >= GAIN else None


def _study(space: Space, terms: Terms) -> "tuple[optuna.Study, dict[str, optuna.distributions.BaseDistribution]]":
    optuna = load_optuna()
    distributions = {
        name: optuna.distributions.CategoricalDistribution((False, True))
        if room is None
        else optuna.distributions.IntDistribution(*room)
        for name, room in space.items()
    }
    sampler = optuna.samplers.TPESampler(seed=terms.seed, n_startup_trials=max(4, terms.samples // 3))
    # It would announce the study on stderr.
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(direction="maximize", sampler=sampler), distributions
    finally:
        optuna.logging.set_verbosity(verbosity)


def _parameters(knobs: Knobs, space: Space) -> dict[str, object]:
    values = asdict(knobs)
    # With many ranks on a host a slot has less room than the setting says.
    return {
        name: values[name] if room is None else min(max(values[name].bit_length() - 1, room[0]), room[1])
        for name, room in space.items()
    }


def _knobs(default: Knobs, space: Space, parameters: Mapping[str, int]) -> Knobs:
    values = {name: value if space[name] is None else 1 << value for name, value in parameters.items()}
    return replace(default, **values)  # type: ignore[arg-type]  # a knob of yes or no gets one
