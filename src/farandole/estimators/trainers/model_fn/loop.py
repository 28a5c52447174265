"""A rank's training loop: steps, checkpoints at intervals, an evaluation after each checkpoint, and the export."""

import inspect
import math
import shutil
import time
from pathlib import Path
from typing import SupportsFloat, TypeGuard

import keras

from farandole.core.operations.objects import allgather_object
from farandole.core.public import init, rank, shutdown, size
from farandole.errors import ConfigError
from farandole.estimators.run_lock import require_owner
from farandole.estimators.trainers.keras.model import DumpedModel
from farandole.estimators.trainers.model_fn.folder import ModelFolder
from farandole.estimators.trainers.model_fn.frozen_graph import FrozenGraph
from farandole.estimators.trainers.model_fn.graph import Built, GraphProgram, call, config_of
from farandole.estimators.trainers.model_fn.intact import choose_intact
from farandole.estimators.trainers.model_fn.job import ModelFnJob, Program, Table
from farandole.estimators.trainers.model_fn.keras_model import KerasProgram
from farandole.estimators.trainers.model_fn.rows import full_batches, table_of, validation_batches
from farandole.estimators.trainers.rows import Rows, open_rows
from farandole.spark.driver.messages import log_to_driver, send
from farandole.spark.driver.progress import Progress
from farandole.spark.jobs.child import shard
from farandole.tensorflow.estimator import ModeKeys


def train(job: ModelFnJob) -> FrozenGraph | None:
    """Train on the rows that this rank's Spark task was fed; see `fit`."""
    init()
    try:
        path = shard()
        assert path is not None, "an estimator's job has a DataFrame"
        return fit(job, path)
    finally:
        shutdown()


def fit(job: ModelFnJob, path: Path) -> FrozenGraph | None:
    """Train until this run and earlier ones have made `job.max_steps` steps; return the graph on rank 0, else None.

    `path` is the file with this rank's rows. Only rank 0 reads and writes the folder; it broadcasts its checkpoint and
    decides when all ranks save. Raises `ConfigError` for a model function that does not meet its contract, `DataError`
    for rows that no tensor can hold, `SourceError` for a folder without an intact checkpoint. A collective."""
    rows = open_rows(path, job.rows, seed=job.seed, rank=rank(), gather=allgather_object)
    table = table_of(job, rows)
    folder = ModelFolder(job.store) if rank() == 0 else None
    try:
        if folder is not None:
            choose_intact(folder.path, job.model_dir, lambda text: log_to_driver(f"warning: {text}"))
        here = None if folder is None else folder.path
        with _choose_program(job, table, here) as program:
            _Loop(job, rows, program, folder).run()
            if folder is None:
                return None
            return _export(program, folder)
    finally:
        if folder is not None:
            folder.close()


def _choose_program(job: ModelFnJob, table: Table, folder: Path | None) -> Program:
    """Return this rank's program for a Keras model, or for the result of a model function.

    A function without an argument `features` must return a Keras model. If a function with it returns one, it is called
    again, with Keras inputs as features instead of the tensors of a graph. Raises `ConfigError` for other results."""
    model_fn = job.model_fn
    if isinstance(model_fn, DumpedModel):
        return KerasProgram(job, table, folder, model_fn.load())
    taken = inspect.signature(model_fn).parameters.values()
    if any(each.name == "features" or each.kind == each.VAR_KEYWORD for each in taken):
        training = Built(job, table, ModeKeys.TRAIN, seed=job.seed + rank())
        if not isinstance(training.given, keras.Model):
            return GraphProgram(job, table, folder, training)
    keras.backend.clear_session()  # resets the counters in layers' names, which name inputs and outputs
    features = {
        name: keras.Input([] if width is None else [width], dtype=dtype, name=name)
        for name, (dtype, width) in table.features.items()
    }
    model = call(model_fn, features, None, ModeKeys.TRAIN, dict(job.params), config_of(job))
    if not isinstance(model, keras.Model):
        raise ConfigError("modelFn", f"has no argument features, so it must return a keras.Model, got {model!r}")
    return KerasProgram(job, table, folder, model)


class _Loop:
    def __init__(self, job: ModelFnJob, rows: Rows, program: Program, folder: ModelFolder | None) -> None:
        self._job, self._rows, self._program, self._folder = job, rows, program, folder
        self._saved_at = time.monotonic()
        self._diverged = False  # a loss was not finite
        train, held = rows.train.plan.total, rows.held
        kinds = ", ".join(f"{name} {kind}" for name, kind in rows.kinds.items())
        self._report(f"{train} rows train, {held} validate, on {size()} ranks: {kinds}; {program.step} steps are made")
        for warning in rows.warnings():
            self._report(warning, always=True)

    def run(self) -> None:
        """Make the remaining steps, if any."""
        job, program = self._job, self._program
        if program.step >= job.max_steps:
            self._report(f"all {job.max_steps} steps are made already, and nothing is trained")
            return
        progress = Progress(epochs=1, steps=job.max_steps - program.step)
        batches = full_batches(job, self._rows.train, program.step)
        stopped = False
        while program.step < job.max_steps and not stopped:
            loss = program.train(next(batches))
            progress.step(rows=job.rows.batch_size, loss=loss)
            # All ranks stop and save at the same step; otherwise they would wait for a rank that has stopped.
            every = allgather_object((program.stops, self._save_is_due(), loss))
            stopped = any(each[0] for each in every)
            mean = math.fsum(each[2] for each in every) / len(every)
            self._watch(mean)
            last = stopped or program.step >= job.max_steps
            if self._folder is not None and (last or program.step % 100 == 0):
                program.log("", {"loss": mean})
            if last or every[0][1]:
                self._save(mean)

    def _save(self, loss: float) -> None:
        """Write a checkpoint and evaluate it. A collective."""
        job, program = self._job, self._program
        if self._folder is not None:
            require_owner(job.store, job.store.root, job.owner)
            program.save(self._folder.path)
        text = f"step {program.step}: loss {loss:.4f}"
        if self._rows.validate is not None:
            held = validation_batches(job, self._rows.validate)
            metrics = program.evaluate(None if self._folder is None else self._folder.path, held)
            numbers = {name: float(value) for name, value in metrics.items() if _is_number(value)}
            if self._folder is not None:
                program.log("eval", numbers)
            text += "; validation: " + ", ".join(f"{name} {value:.4f}" for name, value in numbers.items())
        if self._folder is not None:
            self._folder.push(last="checkpoint")  # the list of checkpoints
            send("epoch", {"step": program.step})  # counts as progress, see `Attempts.progress`
        self._report(text)
        self._saved_at = time.monotonic()

    def _save_is_due(self) -> bool:
        return self._folder is not None and time.monotonic() - self._saved_at >= self._job.save_secs

    def _watch(self, loss: float) -> None:
        if not math.isfinite(loss) and not self._diverged:
            self._diverged = True
            self._report(
                f"the loss is {loss} in step {self._program.step}; lower the learning rate, or look for extreme "
                "values in the columns",
                always=True,
            )

    def _report(self, text: str, *, always: bool = False) -> None:
        if rank() == 0 and (self._job.verbose or always):
            log_to_driver(text)


def _export(program: Program, folder: ModelFolder) -> FrozenGraph:
    """Write the SavedModel to `export/<step>`, whole or not at all, in place of an older one; return its graph."""
    to = folder.path / "export" / str(program.step)
    unfinished = to.with_name(f".{to.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    frozen = program.export(folder.path, unfinished)
    shutil.rmtree(to, ignore_errors=True)
    unfinished.rename(to)
    folder.push(last="checkpoint")
    return frozen


def _is_number(value: object) -> TypeGuard[SupportsFloat]:
    shape = getattr(value, "shape", ())
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    return math.prod(shape) == 1 and kind in "fiub"
