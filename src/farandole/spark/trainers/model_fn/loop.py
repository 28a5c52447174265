"""A rank's training: steps, checkpoints in time, evaluation after each of them, and the export at the end."""

import math
import shutil
import time
from pathlib import Path

from farandole.core.operations.objects import allgather_object
from farandole.core.public import init, rank, shutdown, size
from farandole.spark.child import shard
from farandole.spark.logs import log_to_driver, send
from farandole.spark.progress import Progress
from farandole.spark.trainers.model_fn.choice import choose_program
from farandole.spark.trainers.model_fn.folder import ModelFolder
from farandole.spark.trainers.model_fn.job import ModelFnJob, Program
from farandole.spark.trainers.model_fn.rows import full_batches, table_of, validation_batches
from farandole.spark.trainers.rows import Rows, open_rows
from farandole.spark.trainers.tensorflow_graph import FrozenGraph

__all__ = ["fit", "train"]


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
    """Train until `job.max_steps` steps are made, by this run and those before it; rank 0 returns the graph.

    `path` is the file with this rank's rows. Rank 0 reads and writes the folder, and says to all ranks where to begin
    and when to end. Raises `ConfigError` for a model function that does not do its part, `DataError` for rows that no
    tensor holds."""
    rows = open_rows(path, job.rows, seed=job.seed, rank=rank(), gather=allgather_object)
    table = table_of(job, rows)
    folder = ModelFolder(job.store) if rank() == 0 else None
    try:
        here = None if folder is None else folder.path
        with choose_program(job, table, here) as program:
            _Loop(job, rows, program, folder).run()
            if folder is None:
                return None
            return _export(program, folder)
    finally:
        if folder is not None:
            folder.close()


class _Loop:
    def __init__(self, job: ModelFnJob, rows: Rows, program: Program, folder: ModelFolder | None) -> None:
        self._job, self._rows, self._program, self._folder = job, rows, program, folder
        self._saved_at = time.monotonic()
        self._lost = False  # the loss is no number any more
        train, held = rows.train.plan.total, 0 if rows.validate is None else rows.validate.plan.total
        kinds = ", ".join(f"{name} {kind}" for name, kind in rows.kinds.items())
        self._say(f"{train} rows train, {held} validate, on {size()} ranks: {kinds}; {program.step} steps are made")
        for name, count in rows.nans.items():
            warning = (
                f"warning: column {name!r}: {count} of {train + held} rows hold NaN; fill them or drop these rows first"
            )
            self._say(warning, always=True)

    def run(self) -> None:
        """Make the steps that are left, of which there may be none."""
        job, program = self._job, self._program
        if program.step >= job.max_steps:
            self._say(f"all {job.max_steps} steps are made already, and nothing is trained")
            return
        progress = Progress(epochs=1, steps=job.max_steps - program.step)
        batches = full_batches(job, self._rows.train, program.step)
        stopped = False
        while program.step < job.max_steps and not stopped:
            loss = program.train(next(batches))
            progress.step(rows=job.rows.batch_size, loss=loss)
            # All ranks stop and save at the same step; otherwise the others would wait for a rank that has stopped.
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
        """Save and evaluate. Every rank comes here at the same step."""
        job, program = self._job, self._program
        if self._folder is not None:
            program.save(self._folder.path)
        said = f"step {program.step}: loss {loss:.4f}"
        if self._rows.validate is not None:
            held = validation_batches(job, self._rows.validate)
            metrics = program.evaluate(None if self._folder is None else self._folder.path, held)
            numbers = {name: float(value) for name, value in metrics.items() if _is_number(value)}
            if self._folder is not None:
                program.log("eval", numbers)
            said += "; validation: " + ", ".join(f"{name} {value:.4f}" for name, value in numbers.items())
        if self._folder is not None:
            self._folder.push()
            send("epoch", {"step": program.step})  # progress, after which attempts count anew
        self._say(said)
        self._saved_at = time.monotonic()

    def _save_is_due(self) -> bool:
        return self._folder is not None and time.monotonic() - self._saved_at >= self._job.save_secs

    def _watch(self, loss: float) -> None:
        if not math.isfinite(loss) and not self._lost:
            self._lost = True
            self._say(
                f"the loss is {loss} in step {self._program.step}; lower the learning rate, or look for extreme "
                "values in the columns",
                always=True,
            )

    def _say(self, text: str, *, always: bool = False) -> None:
        if rank() == 0 and (self._job.verbose or always):
            log_to_driver(text)


def _export(program: Program, folder: ModelFolder) -> FrozenGraph:
    """Write the SavedModel as `export/<step>`, whole or not at all, in place of one that is there."""
    to = folder.path / "export" / str(program.step)
    unfinished = to.with_name(f".{to.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    frozen = program.export(folder.path, unfinished)
    shutil.rmtree(to, ignore_errors=True)
    unfinished.rename(to)
    folder.push()
    return frozen


def _is_number(value: object) -> bool:
    shape = getattr(value, "shape", ())
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    return math.prod(shape) == 1 and kind in "fiub"
