from collections.abc import Sequence
from typing import Any

class Segment:
    @staticmethod
    def create(ranks: int, slot_bytes: int, pair_rings: bool) -> Segment: ...
    @staticmethod
    def attach(fd: int) -> Segment: ...
    @property
    def fd(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    def mark_dead(self, rank: int) -> None: ...

class Knobs:
    def __init__(
        self, *, fusion_threshold: int, slot_bytes: int, link_chunk: int, link_small: int, hierarchical: bool
    ) -> None: ...
    @property
    def fusion_threshold(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def link_chunk(self) -> int: ...
    @property
    def link_small(self) -> int: ...
    @property
    def hierarchical(self) -> bool: ...

class Handle:
    def done(self) -> bool: ...
    def wait(self) -> None: ...
    def result(self) -> Any | None: ...
    def received_splits(self) -> list[int]: ...
    def last_joined(self) -> int: ...
    @property
    def name(self) -> str: ...

def data_peers(rank: int, hosts: Sequence[int], flat: bool = False) -> list[int]:
    """
    The ranks of other hosts that `rank` exchanges data with, when `hosts[r]` is the number of rank r's host.
    """

def make_grid(hosts: Sequence[int]) -> bool:
    """Do all hosts run equally many ranks, more than one?"""

class GroupHandle:
    def done(self) -> bool: ...
    def wait(self) -> None: ...
    def parts(self) -> list[Handle]: ...

class Engine:
    def __init__(
        self,
        *,
        rank: int,
        size: int,
        local_ranks: Sequence[int],
        segment: Segment,
        remotes: Sequence[tuple[int, int, int]],
        hosts: Sequence[int],
        parents: Sequence[int],
        knobs: Knobs,
        cache_capacity: int,
        spin: float,
        timeout: float,
        heartbeat: float,
        stall: float,
        members: Sequence[int] = [],
        process_set: str = "",
        look_ahead: bool = True,
    ) -> None: ...
    def submit(
        self,
        kind: int,
        name: str,
        input: object | None,
        output: object | None,
        *,
        op: int = 1,
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = 0,
        splits: Sequence[int] | None = None,
        group: str = "",
        group_size: int = 0,
        cacheable: bool = True,
    ) -> Handle: ...
    def run(
        self,
        kind: int,
        name: str,
        input: object | None,
        output: object | None,
        *,
        op: int = 1,
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = 0,
        splits: Sequence[int] | None = None,
        group: str = "",
        group_size: int = 0,
        cacheable: bool = True,
    ) -> Handle: ...
    def shared_buffer(self, nbytes: int) -> Any: ...
    def reduce(
        self, name: str, input: object, output: object, op: int, prescale: float, postscale: float, /
    ) -> None: ...
    def start_reduce(
        self, name: str, input: object, output: object, op: int, prescale: float, postscale: float, /
    ) -> Handle: ...
    def reduce_group(
        self,
        name: str,
        inputs: Sequence[object],
        outputs: Sequence[object],
        op: int,
        prescale: float,
        postscale: float,
        cacheable: bool,
    ) -> None: ...
    def start_group(
        self,
        kind: int,
        name: str,
        inputs: Sequence[object],
        outputs: Sequence[object],
        op: int,
        prescale: float,
        postscale: float,
        cacheable: bool,
    ) -> GroupHandle: ...
    def start_each(
        self,
        names: Sequence[object],
        inputs: Sequence[object],
        outputs: Sequence[object],
        op: int,
        prescale: float,
        postscale: float,
        wake: bool,
    ) -> GroupHandle: ...
    def shutdown(self) -> None: ...
    def require_alive(self) -> None: ...
    def turn(self, knobs: Knobs, paced: bool) -> None: ...
    def tuned(self) -> tuple[Knobs, int, list[tuple[int, int]]]: ...
    def stalls(self) -> list[tuple[str, float, list[int], list[int]]]: ...
    def stats(self) -> dict[str, int]: ...
    def start_trace(self, marks_plans: bool) -> None: ...
    def stop_trace(self) -> None: ...

class TraceText:
    def __init__(self, rank: int) -> None: ...
    def take(self, engine: Engine, label: str) -> None: ...
    def next(self) -> bytes: ...

def append_to_trace(fd: int, end: int, events: bytes) -> tuple[int, int]: ...

class Slot:
    def __init__(self, local_rank: int, local_size: int) -> None: ...
    @property
    def number(self) -> int: ...
    def add(self, process_set: int, engine: Engine | None) -> None: ...
    def remove(self, process_set: int) -> None: ...
    def close(self) -> None: ...

def core_table() -> int: ...
def simd_level() -> str: ...
