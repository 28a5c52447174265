"""Search for good knobs: a generator that chooses what to sample next and compares scores. Pure; `tuner` samples.

Optuna's tree-structured Parzen estimator (Bergstra et al. 2011) proposes knobs. Optuna is in the extra `autotune`."""

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

# By knob: the smallest and largest exponent of its power of two, or None for a flag.
Space: TypeAlias = Mapping[str, tuple[int, int] | None]
Marks: TypeAlias = list[tuple[int, int]]  # at the end of each step: the time in ns, and the bytes so far

# Two sets of knobs are sampled alternately, so that other load on the machine affects both. Knobs that are not faster
# win 8 of 9 comparisons with a chance of one in fifty. A gain below 2% is not worth a change.
TURNS, WINS = 9, 8
GAIN = 1.02
FINALISTS = 2  # the best knobs of the search, which are compared in this way
REFERENCE_EVERY = 5  # one of so many samples of the search is of the default


@dataclass(frozen=True, slots=True)
class Trial:
    """The knobs and the purpose of the next sample: "warmup", "search" or "confirm"."""

    phase: str
    knobs: Knobs


@dataclass(frozen=True, slots=True)
class Outcome:
    """The chosen knobs, and their speed divided by that of the default knobs."""

    knobs: Knobs
    gain: float


@dataclass(frozen=True, slots=True)
class Terms:
    """The length of the search: `warmup` samples that do not count, then `samples`. `seed` is for the sampler."""

    warmup: int
    samples: int
    seed: int = 0


def load_optuna() -> ModuleType:
    """Import optuna; raises `ConfigError` with the remedy if it is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError("autotune", "needs optuna, which is not installed; pip install farandole[autotune]")
    # Optuna keeps the ImportErrors of packages that it lacks, and with them the frames of its first importer and their
    # variables. In a separate thread these frames hold no variables of the job.
    with ThreadPoolExecutor(1, thread_name_prefix="farandole-optuna") as thread:
        return thread.submit(importlib.import_module, "optuna").result()


def space_of(config: Config, hosts: int, is_grid: bool, largest_slot: int) -> Space:
    """Return the knobs that have an effect on this many hosts and that the user has not set, each with its range."""
    space: dict[str, tuple[int, int] | None] = {"fusion_threshold": (16, 28)}
    if hosts == 1 or is_grid:
        space["slot_bytes"] = (14, min(largest_slot, LARGEST_SLOT).bit_length() - 1)
    if hosts > 1:
        space |= {"link_chunk": (15, 20), "link_small": (12, 18)}
    if is_grid:
        space["hierarchical"] = None
    return {name: room for name, room in space.items() if config.leaves_free(name)}


def score(marks: Marks, steps: int, least_ns: int) -> float | None:
    """Return the median over the steps between `marks` of the bytes per second.

    None while there are fewer than `steps` steps, or while they took less than `least_ns` together."""
    if len(marks) <= steps or marks[-1][0] - marks[0][0] < least_ns:
        return None
    pairs = itertools.pairwise(marks)
    return statistics.median(1e9 * (then - now) / max(1, later - soon) for (soon, now), (later, then) in pairs)


def search(space: Space, default: Knobs, saved: Knobs | None, terms: Terms) -> Generator[Trial, float, Outcome]:
    """Yield the knobs of the next sample, receive its score, and return the chosen knobs.

    `saved` are the chosen knobs of an earlier job. If they are clearly faster than `default`, they are chosen without a
    search. Otherwise the best knobs of the search are chosen if they are clearly faster, and else `default`. So noise
    cannot lead to knobs that are slower than `default`."""
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
    """Take `terms.samples` samples; return the knobs that were faster than the default ones, the fastest first.

    Scores are divided by the latest score of the default, so that a slowdown of the machine does not affect them."""
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
    """Sample both alternately; return the challenger's gain if it is clearly faster, None as soon as it cannot be."""
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
    # Optuna would write about the study to stderr.
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(direction="maximize", sampler=sampler), distributions
    finally:
        optuna.logging.set_verbosity(verbosity)


def _parameters(knobs: Knobs, space: Space) -> dict[str, object]:
    values = asdict(knobs)
    # With many ranks on a host a slot is smaller than the setting.
    return {
        name: values[name] if room is None else min(max(values[name].bit_length() - 1, room[0]), room[1])
        for name, room in space.items()
    }


def _knobs(default: Knobs, space: Space, parameters: Mapping[str, int]) -> Knobs:
    values = {name: value if space[name] is None else 1 << value for name, value in parameters.items()}
    return replace(default, **values)  # type: ignore[arg-type]  # flags get bools
