"""Command line of a Flyte task's pod, with the placeholders filled in, and the outputs of the task."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.flyte import settings


@dataclass(frozen=True)
class Attempt:
    """One attempt at a task, with its files below `folder`."""

    folder: Path
    number: int = 0

    @property
    def outputs(self) -> Path:
        return self.folder / "outputs"

    def command(self, task: Any, inputs: dict[str, Any]) -> list[str]:
        """Write the inputs; return the container's command line, filled in as Flyte's propeller does."""
        from flytekit import FlyteContextManager
        from flytekit.core.type_engine import TypeEngine
        from flytekit.tools.translator import get_serializable

        ctx = FlyteContextManager.current_context()
        literals = TypeEngine.dict_to_literal_map(ctx, inputs, task.python_interface.inputs)
        (self.folder / "inputs.pb").write_bytes(literals.to_flyte_idl().SerializeToString())
        places = {
            "{{.input}}": self.folder / "inputs.pb",
            "{{.outputPrefix}}": self.outputs,
            "{{.rawOutputDataPrefix}}": self.folder / "raw",
            "{{.checkpointOutputPrefix}}": self._checkpoint(self.number),
            "{{.prevCheckpointPrefix}}": self._checkpoint(self.number - 1) if self.number else '""',
        }
        template: Any = get_serializable({}, settings(), task).template
        return [str(places.get(word, word)) for word in template.container.args]

    def _checkpoint(self, number: int) -> Path:
        return self.folder / f"checkpoint{number}"

    def outcome(self) -> tuple[dict[str, Any], str, bool]:
        """Return the outputs by name, the error's message ("" without one), and whether Flyte tries again."""
        from flyteidl.core import errors_pb2, literals_pb2
        from flytekit import FlyteContextManager
        from flytekit.core.type_engine import TypeEngine
        from flytekit.models.literals import LiteralMap

        errors = self.outputs / "error.pb"
        if errors.exists():
            error = errors_pb2.ErrorDocument.FromString(errors.read_bytes()).error
            errors.unlink()
            return {}, error.message, error.kind == errors_pb2.ContainerError.RECOVERABLE
        content = literals_pb2.LiteralMap.FromString((self.outputs / "outputs.pb").read_bytes())
        found = LiteralMap.from_flyte_idl(content).literals
        ctx = FlyteContextManager.current_context()
        kinds = {name: TypeEngine.guess_python_type(TypeEngine.to_literal_type(list[int])) for name in found}
        return {name: TypeEngine.to_python_value(ctx, each, kinds[name]) for name, each in found.items()}, "", False
