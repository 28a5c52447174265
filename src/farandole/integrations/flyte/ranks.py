"""A rank's part of a Flyte task: its context, conversion of inputs, and rank 0's outputs as literals."""

import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from flyteidl.core import interface_pb2, literals_pb2
from flytekit import FlyteContext, FlyteContextManager
from flytekit.bin.entrypoint import setup_execution
from flytekit.core.base_task import IgnoreOutputs
from flytekit.core.context_manager import ExecutionState
from flytekit.core.type_engine import TypeEngine
from flytekit.models.interface import Variable
from flytekit.models.literals import Literal, LiteralMap
from flytekit.tools.fast_registration import download_distribution

from farandole.topology import JobEnvironment


def runs_in_cluster(ctx: FlyteContext) -> bool:
    """Return whether the task runs in a pod of Flyte and not in a local execution."""
    return ctx.execution_state is not None and ctx.execution_state.mode == ExecutionState.Mode.TASK_EXECUTION


def folder_of(function: Callable[..., object]) -> str | None:
    """Return the folder from which the function's module was imported; None if it was not imported from a file.

    `pyflyte run` removes the folder from `sys.path` after it has loaded the module, and ranks load the module again."""
    name = function.__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    if name == "__main__" or file is None:
        return None
    path = Path(file).resolve()
    return str(path.parents[name.count(".") + (path.name == "__init__.py")])


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLocations:
    """The locations in a task's context that ranks need: outputs, checkpoints and code."""

    raw_outputs: str
    outputs: str | None
    checkpoint: str | None
    earlier_checkpoint: str | None  # of the previous attempt, or of this attempt if its pod was restarted
    code: str | None  # the archive of a fast registration

    @classmethod
    def of(cls, ctx: FlyteContext) -> Self:
        """Return the locations for the task that runs in `ctx`.

        Looks in the store for a checkpoint of this attempt, which exists if the launcher's pod was restarted: Flyte
        does not count a restart as a new attempt, and would use the previous attempt's checkpoint. Ranks get a copy,
        because rank 0 may write a new checkpoint while another rank reads."""
        user, settings = ctx.user_space_params, ctx.serialization_settings
        checkpoint = None if user is None else user._checkpoint
        written: str | None = getattr(checkpoint, "_checkpoint_dest", None)
        earlier: str | None = getattr(checkpoint, "_checkpoint_src", None)
        if written is not None and runs_in_cluster(ctx) and ctx.file_access.exists(written):
            copied = ctx.file_access.get_random_local_directory()
            ctx.file_access.get_data(written, copied, is_multipart=True)
            earlier = ctx.file_access.put_raw_data(copied)
        fast = None if settings is None else settings.fast_serialization_settings
        return cls(
            raw_outputs=ctx.file_access.raw_output_prefix,
            outputs=None if user is None else user.output_metadata_prefix,
            checkpoint=written,
            earlier_checkpoint=earlier,
            code=fast.distribution_location if fast is not None and fast.enabled else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlyteCall:
    """Call of a task's function, with its inputs in Flyte's form."""

    name: str
    function: Callable[..., object]
    inputs: Mapping[str, type]
    outputs: Mapping[str, type]
    variables: Mapping[str, bytes]  # the outputs' Flyte types, serialized
    in_tuple: bool  # the function is declared to return a NamedTuple
    literals: bytes

    def run(self, ctx: FlyteContext, *, upload: bool) -> bytes:
        """Call the function; with `upload`, upload its outputs and return them as serialized literals."""
        literals = LiteralMap.from_flyte_idl(literals_pb2.LiteralMap.FromString(self.literals))
        value = self._value(TypeEngine.literal_map_to_kwargs(ctx, literals, dict(self.inputs)))
        if not upload:
            return b""
        made = {name: self._literal(ctx, name, each) for name, each in self._by_name(value).items()}
        content: bytes = LiteralMap(literals=made).to_flyte_idl().SerializeToString()
        return content

    def _value(self, given: dict[str, object]) -> object:
        try:
            return self.function(**given)
        except SystemExit as end:
            if end.code:
                raise
            return None  # as for other calls on ranks

    def _by_name(self, value: object) -> dict[str, object]:
        if not self.outputs:
            return {}
        if len(self.outputs) == 1 and not (self.in_tuple and isinstance(value, tuple)):
            return {next(iter(self.outputs)): value}
        if not isinstance(value, tuple) or len(value) != len(self.outputs):
            returned = f"{len(value)} values" if isinstance(value, tuple) else type(value).__name__
            names = ", ".join(self.outputs)
            raise TypeError(f"task {self.name!r} has {len(self.outputs)} outputs ({names}); rank 0 returned {returned}")
        return dict(zip(self.outputs, value, strict=True))

    def _literal(self, ctx: FlyteContext, name: str, value: object) -> Literal:
        variable = Variable.from_flyte_idl(interface_pb2.Variable.FromString(self.variables[name]))
        try:
            return TypeEngine.to_literal(ctx, value, self.outputs[name], variable.type)
        except Exception as error:
            error.add_note(f"output {name!r} of task {self.name!r} on rank 0 is {type(value).__name__}")
            raise


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a rank: its outputs as serialized literals, or why they are ignored, and its decks as (name, HTML)."""

    literals: bytes = b""
    ignored: str | None = None
    decks: Sequence[tuple[str, str]] = ()

    def outputs(self) -> LiteralMap:
        """Return the outputs; raises `IgnoreOutputs` if the function raised it."""
        if self.ignored is not None:
            raise IgnoreOutputs(self.ignored)
        return LiteralMap.from_flyte_idl(literals_pb2.LiteralMap.FromString(self.literals))


def run_on_rank(locations: TaskLocations, folder: str | None, call: bytes) -> Outcome:
    """Run a pickled `FlyteCall` on this rank; return outputs and decks on rank 0. `folder` is added to `sys.path`.

    Within the call, `flytekit.current_context()` is that of the task, with its checkpoint. `IgnoreOutputs`, which
    functions for mpirun raise on ranks other than 0, is not an error."""
    job = JobEnvironment.read()
    assert job is not None, "a launcher of ours has started this process"
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)
    with ExitStack() as stack:
        if locations.code is not None:
            archive = stack.enter_context(tempfile.TemporaryDirectory(prefix="farandole-flyte-"))
            download_distribution(locations.code, archive)
            sys.path.insert(0, archive)
        with setup_execution(
            raw_output_data_prefix=locations.raw_outputs,
            output_metadata_prefix=locations.outputs,
            checkpoint_path=locations.checkpoint,
            prev_checkpoint=locations.earlier_checkpoint,
        ):
            given: FlyteCall = pickle.loads(call)
            ctx = FlyteContextManager.current_context()
            try:
                made = Outcome(given.run(ctx, upload=job.rank == 0))
            except IgnoreOutputs as error:
                made = Outcome(ignored=str(error))
            if job.rank or ctx.user_space_params is None:
                return made
            return replace(made, decks=[(deck.name, deck.html) for deck in ctx.user_space_params.decks])
