"""Autotune on rank 0: a thread that samples the speed of the running job and changes the knobs of all ranks."""

import logging
import threading
from collections.abc import Callable
from dataclasses import asdict

from farandole._native import Engine, make_grid
from farandole.config import Config
from farandole.core.autotune.knobs import Knobs
from farandole.core.autotune.tuning import Marks, Outcome, Space, Terms, Trial, load_optuna, score, search, space_of
from farandole.core.autotune.tuning_log import Row, TuningLog
from farandole.topology import Topology

log = logging.getLogger(__name__)

LEAST_NS = 50_000_000  # of a sample; shorter samples are mostly noise
SHORTEST_NAP, LONGEST_NAP = 0.002, 0.5  # seconds between two reads of the engine's marks


class Tuner:
    """Searches for good knobs while the job runs, in a thread from `start` until the search ends or `close` is called.

    The constructor reads the log of earlier jobs. It raises `ConfigError` if the file is not a log of autotune, or if
    optuna is not installed."""

    def __init__(self, config: Config) -> None:
        load_optuna()
        self._config, self._log = config, TuningLog(config.autotune_log)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(
        self,
        engine: Engine,
        topology: Topology,
        default: Knobs,
        largest_slot: int,
        show: Callable[[dict[str, float]], None],
    ) -> None:
        """Start the search on rank 0 of `topology`, whose knobs are `default`; each turn calls `show` with new ones."""
        self._engine, self._topology, self._show = engine, topology, show
        hosts = topology.host_numbers
        space = space_of(self._config, len(set(hosts)), make_grid(hosts), largest_slot)
        if topology.size == 1 or not space:
            log.info("there is nothing to tune: %s", "one rank alone" if space else "every setting is given")
            self._log.close()
            return
        thread = threading.Thread(target=self._run, args=(space, default), name="farandole-tuner", daemon=True)
        thread.start()
        self._thread = thread

    def close(self) -> None:
        """End the search and its thread; the knobs stay as they are. Idempotent."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        self._log.close()

    def _run(self, space: Space, default: Knobs) -> None:
        try:
            outcome, reached = self._search(space, default)
        except Exception:
            # Autotune is optional, so its failure must not end the training.
            log.exception("autotune failed; the settings are the given ones again")
            self._turn(default, paced=False)
            return
        if outcome is None:
            return
        self._turn(outcome.knobs, paced=False)
        self._log.add(self._row("chosen", outcome.knobs, reached))
        self._log.close()
        changed = [f"{name}={value}" for name, value in asdict(outcome.knobs).items() if name in space]
        better = f"{outcome.gain:.2f} times as fast as" if outcome.gain > 1 else "no setting is clearly faster than"
        log.info("autotune is done: %s, %s the default setting", ", ".join(changed), better)

    def _search(self, space: Space, default: Knobs) -> tuple[Outcome | None, float]:
        """Run the search. Return its outcome, None if `close` ended it, and the latest speed of the chosen knobs."""
        config, topology = self._config, self._topology
        saved = self._log.result(topology.size, topology.cross_size)
        if saved is not None:
            # Knobs that are not in the search keep this job's settings.
            saved = Knobs(**{**asdict(default), **{name: asdict(saved)[name] for name in space}})
        steps = search(space, default, saved, Terms(config.autotune_warmup_samples, config.autotune_max_samples))
        latest: dict[Knobs, float] = {}
        taken = 0
        try:
            trial: Trial = next(steps)
            while True:
                reached = self._sample(trial.knobs)
                if reached is None:
                    steps.close()
                    log.warning(
                        "autotune chose nothing: the job ended after %d samples of %d steps; train longer, or lower "
                        "autotune_max_samples (%d) or autotune_steps_per_sample",
                        taken,
                        config.autotune_steps_per_sample,
                        config.autotune_max_samples,
                    )
                    return None, 0.0
                taken += 1
                latest[trial.knobs] = reached
                self._log.add(self._row(trial.phase, trial.knobs, reached))
                trial = steps.send(reached)
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome, latest[outcome.knobs]

    def _sample(self, knobs: Knobs) -> float | None:
        """Run all ranks with `knobs` for some steps. Return bytes per second, or None if `close` ended the search."""
        turns = self._engine.tuned()[1]
        self._turn(knobs, paced=True)
        nap = SHORTEST_NAP
        while not self._stop.wait(nap):
            _, now, marks = self._engine.tuned()
            if now == turns:
                continue
            reached = score(marks, self._config.autotune_steps_per_sample, LEAST_NS)
            if reached is not None:
                return reached
            nap = self._rest(marks)
        return None

    def _rest(self, marks: Marks) -> float:
        """Return how many seconds to wait until there are enough marks for a score."""
        if len(marks) < 2:
            return SHORTEST_NAP
        passed = marks[-1][0] - marks[0][0]
        needed = max(LEAST_NS, passed * self._config.autotune_steps_per_sample / (len(marks) - 1))
        return min(max((needed - passed) / 1e9, SHORTEST_NAP), LONGEST_NAP)

    def _turn(self, knobs: Knobs, *, paced: bool) -> None:
        self._engine.turn(knobs.for_engine(), paced)
        self._show({name: float(value) for name, value in asdict(knobs).items()})

    def _row(self, phase: str, knobs: Knobs, reached: float) -> Row:
        return Row(phase, self._topology.size, self._topology.cross_size, knobs, reached)
