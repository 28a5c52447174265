"""Checkpoint of a run, written after each epoch and read when a fit with the same run id starts."""

import io
import json
import zipfile
from dataclasses import dataclass, field, fields

from farandole.errors import DataError
from farandole.spark.trainers.report import Record

_FACTS, _STATE = "run.json", "state"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state after `epoch` finished epochs: a zip of JSON and the framework's own state. Loading it runs no code.

    It does not hold random generators: each epoch seeds them anew from `seed`, its number and the rank.
    """

    kind: str = ""  # of the estimator; other kinds cannot read the state
    epoch: int = 0
    step: int = 0
    seed: int
    # Weights and optimizer, as the trainer wrote them. The learning rate is the user's, not yet multiplied by the
    # number of ranks. So it is multiplied once, however often the run is resumed and on any number of ranks.
    state: bytes | None = None
    history: list[Record] = field(default_factory=list)
    best: Record | None = None  # the epoch of the smallest validation loss
    outputs: list[tuple[str, list[int]]] | None = None  # type and shape of one row of each output
    stopped: bool = False  # a callback ended the training before its last epoch

    def dump(self) -> bytes:
        """Return the file's content."""
        facts = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "state"}
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(_FACTS, json.dumps(facts))
            if self.state is not None:
                archive.writestr(_STATE, self.state)
        return file.getvalue()

    @classmethod
    def load(cls, content: bytes) -> "Checkpoint":
        """Read the result of `dump` without running code in it; raises `DataError` for another file."""
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                facts = json.loads(archive.read(_FACTS))
                state = archive.read(_STATE) if _STATE in archive.namelist() else None
        except (zipfile.BadZipFile, KeyError) as error:
            raise DataError(
                "checkpoint", "is not of farandole's estimators, or was cut off; use another run_id"
            ) from error
        outputs = facts.pop("outputs")
        outputs = None if outputs is None else [(dtype, shape) for dtype, shape in outputs]
        return cls(state=state, outputs=outputs, **facts)
