"""Errors of farandole.

FarandoleError
├── ConfigError (ValueError)                    a setting is wrong, before anything started
├── MissingExtra (ModuleNotFoundError)          a package is not installed: the extra that installs it
├── RendezvousError                             ranks did not meet: the missing ranks, the address
│   └── AuthenticationError                     a peer could not prove membership of this job
├── RankFailed (RuntimeError)                   a rank's function or process failed: its traceback and last lines
├── SlotsError (ValueError)                     more ranks than slots
│   └── SlotsTimeout (TimeoutError)             more slots did not become free in time
├── HostsError (OSError)                        hosts that cannot be used: the reason of each
├── PicklingError (TypeError)                   an object cannot be sent to the ranks; its path
├── DataError (ValueError, RuntimeError)        a column cannot be read as asked
│   └── NoDataAvailableError                    shards have no rows; Petastorm's name
├── ReaderError (RuntimeError)                  an iterator of a reader that has begun another pass, or was stopped
├── SourceError (ValueError)                    a file or folder of the data cannot be read as it was planned
├── CacheError (OSError)                        the local cache cannot be written
├── TraceError (ValueError)                     a file is not a timeline, or is damaged; the place
├── CollectiveError                             an operation failed; carries `name`
│   ├── InvalidRequest (ValueError)             refused at the call: dtype, duplicate name, splits, root, ...
│   │   └── UnsupportedReduction (RuntimeError) the operation has no such reduction
│   ├── MismatchError *                         ranks asked for different things
│   ├── JoinedError *                           the operation needs data of a rank that has joined
│   ├── FabricError *                           the library that carries the data, such as MPI, has failed
│   ├── CollectiveTimeout (TimeoutError) *      the missing ranks, the time waited
│   └── PeerLost (ConnectionError) *            carries `rank`; the others can go on in a new generation
└── HorovodInternalError (RuntimeError)         base of *, for Horovod's programs: the job failed
    ├── NotInitializedError (ValueError)        rank(), size(), ... before init()
    └── EngineClosed                            submitted after shutdown, or after the failure it names

The fields of an error are its `args`, so that it survives pickle and crosses processes. Errors of settings, data and
ranks mask secrets in their texts (`farandole.masking`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Self

from farandole.masking import mask, mask_foreign

__all__ = [
    "AuthenticationError",
    "CacheError",
    "CollectiveError",
    "CollectiveTimeout",
    "ConfigError",
    "DataError",
    "EngineClosed",
    "FabricError",
    "FarandoleError",
    "HorovodInternalError",
    "HostsError",
    "InvalidRequest",
    "JoinedError",
    "MismatchError",
    "MissingExtra",
    "NoDataAvailableError",
    "NotInitializedError",
    "PeerLost",
    "PicklingError",
    "RankFailed",
    "ReaderError",
    "RendezvousError",
    "SlotsError",
    "SlotsTimeout",
    "SourceError",
    "TraceError",
    "UnsupportedReduction",
    "spell_ranks",
]


def spell_ranks(ranks: Iterable[int]) -> str:
    """Return the text for some ranks: "rank 3", "ranks 0-2 and 5", "no rank"."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    if not runs:
        return "no rank"
    parts = [part for run in runs for part in _spell_run(run)]
    if len(parts) == 1:
        return f"rank {parts[0]}" if runs[0][0] == runs[0][-1] else f"ranks {parts[0]}"
    return f"ranks {', '.join(parts[:-1])} and {parts[-1]}"


def _spell_run(run: list[int]) -> list[str]:
    return [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]


class FarandoleError(Exception):
    """Base of all errors of farandole."""

    def __init__(self, *fields: object) -> None:
        # OSError, a base of some subclasses, would take (errno, strerror) from its arguments.
        super().__init__()
        self.args = fields

    def __reduce__(self) -> tuple[type[Self], tuple[object, ...], dict[str, object]]:
        return type(self), self.args, self.__dict__


class ConfigError(FarandoleError, ValueError):
    """The setting `setting` is wrong; raised before anything has started."""

    def __init__(self, setting: str, problem: str) -> None:
        problem = mask(problem)
        super().__init__(setting, problem)
        self.setting, self.problem = setting, problem

    def __str__(self) -> str:
        return f"{self.setting}: {self.problem}"


class MissingExtra(FarandoleError, ModuleNotFoundError):
    """`module` needs the package `title`, which is not installed; the extra `extra` of farandole installs it."""

    def __init__(self, module: str, title: str, extra: str, package: str) -> None:
        super().__init__(module, title, extra, package)
        self.module, self.title, self.extra, self.name = module, title, extra, package

    def __str__(self) -> str:
        return f"{self.module} needs {self.title}: pip install 'farandole[{self.extra}]'"


class RendezvousError(FarandoleError):
    """The rendezvous at `where` failed; `missing` are the ranks that did not arrive, if any."""

    def __init__(self, problem: str, missing: Iterable[int] = (), where: str = "") -> None:
        self.problem, self.missing, self.where = problem, tuple(missing), where
        super().__init__(problem, self.missing, where)

    def __str__(self) -> str:
        place = f" (rendezvous at {self.where})" if self.where else ""
        if not self.missing:
            return f"{self.problem}{place}"
        who = spell_ranks(self.missing)
        return (
            f"{self.problem}{place}; missing: {who}. Look at the output of {who}, "
            "or raise start_timeout (FARANDOLE_START_TIMEOUT)"
        )


class AuthenticationError(RendezvousError):
    """The peer at `where` could not prove that it belongs to this job."""

    def __str__(self) -> str:
        place = f"{self.where} " if self.where else "the peer "
        return f"{place}is not a member of this job: {self.problem}"


class RankFailed(FarandoleError, RuntimeError):
    """The function or the process of rank `rank` failed; holds its traceback and its last lines of output.

    `earlier` has one text for each attempt before the last one."""

    def __init__(
        self, rank: int, reason: str, traceback: str = "", tail: Sequence[str] = (), earlier: Sequence[str] = ()
    ) -> None:
        self.rank, self.reason, self.traceback = rank, mask_foreign(reason), mask_foreign(traceback)
        self.tail, self.earlier = tuple(map(mask_foreign, tail)), tuple(map(mask_foreign, earlier))
        super().__init__(rank, self.reason, self.traceback, self.tail, self.earlier)

    def __str__(self) -> str:
        attempt = f" in attempt {len(self.earlier) + 1}" if self.earlier else ""
        parts = [f"rank {self.rank} failed{attempt}: {self.reason}"]
        parts += [f"attempt {number}: {reason}" for number, reason in enumerate(self.earlier, 1)]
        if self.traceback:
            parts += [f"--- traceback of rank {self.rank} ---", self.traceback.rstrip("\n")]
        if self.tail:
            parts += [f"--- last lines of rank {self.rank} ---", *self.tail]
        return "\n".join(parts)


class SlotsError(FarandoleError, ValueError):
    """`wanted` ranks do not fit in the `available` slots of `where`."""

    def __init__(self, wanted: int, available: int, where: str) -> None:
        super().__init__(wanted, available, where)
        self.wanted, self.available, self.where = wanted, available, where

    def __str__(self) -> str:
        return (
            f"{self.wanted} ranks need {self.wanted} slots, but {self.where} has {self.available}; "
            f"ask for at most {self.available}, or give it more"
        )


class SlotsTimeout(SlotsError, TimeoutError):
    """`wanted` ranks still do not fit in the `available` slots of `where` after a wait for more of them."""

    def __init__(self, wanted: int, available: int, where: str) -> None:
        super().__init__(wanted, available, where)
        self.args = (wanted, available, where)  # OSError keeps only two


class HostsError(FarandoleError, OSError):
    """Ranks cannot be started on some hosts; `reasons` has a text for each."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = {host: mask(reason) for host, reason in reasons.items()}
        super().__init__(self.reasons)

    def __str__(self) -> str:
        each = "".join(f"\n  {host}: {reason}" for host, reason in self.reasons.items())
        return f"ranks cannot be started on these hosts:{each}"


class PicklingError(FarandoleError, TypeError):
    """The part `path` of `what` cannot be pickled for the ranks."""

    def __init__(self, what: str, path: str, why: str) -> None:
        super().__init__(what, path, why)
        self.what, self.path, self.why = what, path, why

    def __str__(self) -> str:
        return (
            f"cannot send {self.what} to the ranks: {self.path} cannot be pickled ({self.why}); "
            "create it inside the function that the ranks run"
        )


class DataError(FarandoleError, ValueError, RuntimeError):
    """The column `column`, or "" for all, cannot be read as requested; Petastorm's programs expect a `RuntimeError`."""

    def __init__(self, column: str, problem: str) -> None:
        problem = mask(problem)
        super().__init__(column, problem)
        self.column, self.problem = column, problem

    def __str__(self) -> str:
        return f"column '{self.column}': {self.problem}" if self.column else self.problem


class NoDataAvailableError(DataError):
    """There are too few rows for each shard to have one in each epoch."""


class ReaderError(FarandoleError, RuntimeError):
    """An iterator cannot go on: its reader has begun another pass, or was stopped."""


class SourceError(FarandoleError, ValueError):
    """The file or folder `path` of the data cannot be read as it was planned."""

    def __init__(self, path: str, problem: str) -> None:
        path, problem = mask(path), mask(problem)
        super().__init__(path, problem)
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


class CacheError(FarandoleError, OSError):
    """The local cache in `folder` cannot store a row group."""

    def __init__(self, folder: str, problem: str) -> None:
        folder, problem = mask(folder), mask(problem)
        super().__init__(folder, problem)
        self.folder, self.problem = folder, problem

    def __str__(self) -> str:
        return f"cache {self.folder}: {self.problem}"


class TraceError(FarandoleError, ValueError):
    """The file `path` cannot be read as a timeline; `problem` names the place."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


class HorovodInternalError(FarandoleError, RuntimeError):
    """The job failed, not only this call. Programs written for Horovod catch this class.

    They also raise it themselves to restart elastic training from the last commit."""


class NotInitializedError(HorovodInternalError, ValueError):
    """A program called rank(), size() or an operation before init(), or on a thread that is no rank."""

    def __init__(self, *, ranks_are_threads: bool = False) -> None:
        super().__init__()
        self._ranks_are_threads = ranks_are_threads

    def __str__(self) -> str:
        if self._ranks_are_threads:
            return (
                "This thread is no rank: the ranks are threads of this process, and an operation belongs to the rank's "
                "own thread. PyTorch runs backward for tensors on a GPU on a thread that all of them share; let the "
                "ranks be processes there."
            )
        return "farandole has not been initialized; call init() first."


class CollectiveError(FarandoleError):
    """The operation `name` failed.

    Ranks are numbered as in the job. `process_set` names the process set; it is empty for all ranks."""

    process_set = ""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(name, problem)
        self.name, self.problem = name, problem

    def __str__(self) -> str:
        where = f"in {self.process_set}" if self.process_set else ""
        what = " ".join(part for part in (f"'{self.name}'" if self.name else "", where) if part)
        return f"{what}: {self.problem}" if what else self.problem


class InvalidRequest(CollectiveError, ValueError):
    """This rank alone refuses the call: dtype, duplicate name in flight, splits, root."""


class UnsupportedReduction(InvalidRequest, RuntimeError):
    """The operation has no such reduction; programs for Horovod expect a `RuntimeError`."""


class MismatchError(CollectiveError, HorovodInternalError):
    """Ranks submitted different requests under one name: they differ in `what`; `asked` has each rank's value."""

    def __init__(self, name: str, asked: Mapping[int, str], what: str) -> None:
        self.asked, self.what = dict(asked), what
        differs, one = ("differ", "the same") if what.endswith("s") else ("differs", "one")
        remedy = (
            "give tensors on GPUs on every rank, or on the CPU"
            if what == "device"
            else f"use {one} {what} on every rank"
        )
        super().__init__(name, f"{what} {differs} between ranks ({self._spell_values()}); {remedy}")
        self.args = (name, self.asked, what)

    def _spell_values(self) -> str:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, value in sorted(self.asked.items()):
            ranks_by_value.setdefault(value, []).append(rank)
        return "; ".join(f"{spell_ranks(ranks)}: {value}" for value, ranks in ranks_by_value.items())


class JoinedError(CollectiveError, HorovodInternalError):
    """The operation needs data from a rank that has called `join`, or would lose data meant for that rank."""


class FabricError(CollectiveError, HorovodInternalError):
    """The library that carries the data, such as MPI, has failed; `problem` has its message."""


class CollectiveTimeout(CollectiveError, HorovodInternalError, TimeoutError):
    """The ranks `missing` did not submit the operation within `waited` seconds."""

    def __init__(self, name: str, missing: Iterable[int], waited: float) -> None:
        self.missing, self.waited = tuple(missing), waited
        who = spell_ranks(self.missing) if self.missing else "the other ranks"
        super().__init__(
            name,
            f"waited {waited:.3g} s for {who}; see what {who} did instead (every rank must submit the same operations)"
            ", or raise the timeout (FARANDOLE_COLLECTIVE_TIMEOUT, or FARANDOLE_STALL_SHUTDOWN_TIME if shorter)",
        )
        self.args = (name, self.missing, waited)


class PeerLost(CollectiveError, HorovodInternalError, ConnectionError):
    """Rank `rank` is gone. This context is closed; a new generation without that rank can continue."""

    def __init__(self, name: str, rank: int, reason: str) -> None:
        self.rank, self.reason = rank, reason
        if reason == "it has shut down":  # as the engine says it
            remedy = (
                "its program ended, or called shutdown(), before this operation. All ranks must make the same calls; "
                "join() is for ranks with fewer steps than others"
            )
        else:
            remedy = "its own output says why. Restart from the last checkpoint"
        super().__init__(name, f"rank {rank} is lost ({reason}); {remedy}")
        self.args = (name, rank, reason)


class EngineClosed(HorovodInternalError):
    """An operation was submitted after shutdown, or after the failure in `reason`.

    `process_set` names the process set of the engine; it is empty for all ranks."""

    process_set = ""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        if self.process_set:
            return f"the engine of {self.process_set} is closed: {self.reason}; add the set again to start a new one"
        return f"the engine is closed: {self.reason}; call init() to start a new one"
