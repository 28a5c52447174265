"""Reader of timelines: complete ones, those cut off when a rank was killed, and merged ones."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from farandole.errors import TraceError, spell_ranks
from farandole.timeline.files import sibling_paths
from farandole.timeline.names import NEGOTIATE, QUEUE, own_name
from farandole.timeline.trace import Operation, RankTrace

_SPACE = re.compile(r"\s*")
_NEAR = 1000  # ns: largest rounding error between the end of a negotiation and the begin of its operation
_MOST = 1 << 63  # ns


class Traces:
    """The timelines of several ranks by rank, their files, and warnings about them."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankTrace] = {}
        self.warnings: list[str] = []
        self.paths: list[Path] = []
        self._read_from: dict[int, Path] = {}

    def add(self, path: Path) -> None:
        """Read the file at `path`; a file that was cut off gives its complete events and a warning.

        Raises `TraceError`, naming file and place, if the file cannot be read or is no timeline."""
        file = _File(path)
        self.paths.append(path)
        for rank, trace in file.read().items():
            if rank in self.ranks:
                raise TraceError(str(path), f"holds rank {rank}, and so does {self._read_from[rank]}")
            self.ranks[rank], self._read_from[rank] = trace, path
        self.warnings += file.warnings

    def check(self, *, found: bool) -> None:
        """Warn of missing ranks. With `found`, drop ranks of files found beside rank 0's that its job did not have."""
        self.ranks = dict(sorted(self.ranks.items()))
        size = next((trace.size for trace in self.ranks.values() if trace.size is not None), None)
        if size is None:
            return
        if found:
            for rank in [rank for rank in self.ranks if rank >= size]:
                self.warnings.append(
                    f"{self._read_from[rank]}: left out: there were {size} ranks; it is of another job"
                )
                del self.ranks[rank]
        missing = sorted(set(range(size)) - set(self.ranks))
        if missing:
            self.warnings.append(f"there were {size} ranks; no timeline here is that of {spell_ranks(missing)}")


def read_traces(paths: Iterable[Path]) -> Traces:
    """Read the timelines at `paths`; a single path stands for the other ranks' files beside it, too.

    Raises `TraceError`, naming file and place."""
    given = list(paths)
    siblings = sibling_paths(given[0]) if len(given) == 1 else []
    traces = Traces()
    for path in [*given, *siblings]:
        traces.add(path)
    traces.check(found=bool(siblings))
    return traces


class _File:
    """Reader of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warnings: list[str] = []
        self._ranks: dict[int, RankTrace] = {}
        # By rank and track, a request whose operation is yet to come: when it was made, was agreed on, and would begin.
        self._asked: dict[tuple[int, int], tuple[int | None, int, int]] = {}

    def read(self) -> dict[int, RankTrace]:
        number = 0
        for number, event in enumerate(self._events(self._text()), 1):
            try:
                self._take(event)
            except ValueError as error:
                raise TraceError(str(self.path), f"event {number}: {error}") from error
        if not number and not self.warnings:
            self.warnings.append(f"{self.path}: holds no event")
        return self._ranks

    def _text(self) -> str:
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise TraceError(str(self.path), f"cannot be read ({error.strerror})") from error
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return data[: error.start].decode()
            raise TraceError(str(self.path), f"byte {error.start} is no UTF-8: not a timeline, or damaged") from error

    def _events(self, text: str) -> Iterator[object]:
        """Yield the complete events of an array. A killed writer leaves at most its last line incomplete."""
        decoder = json.JSONDecoder(parse_constant=_refuse_constant)
        at = _skip(text, 0)
        if text[at : at + 1] == "{":
            yield from self._merged(text)
            return
        if text[at : at + 1] not in ("[", ""):
            raise TraceError(str(self.path), f"{_place(text, at)}: not a timeline, which begins with '['")
        count = 0
        at = _skip(text, at + 1)
        while text[at : at + 1] != "]":
            try:
                event, end = decoder.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                self._require_cut(text, at, count, str(error))
                return
            yield event
            count += 1
            at = _skip(text, end)
            if text[at : at + 1] == ",":
                at = _skip(text, at + 1)
            elif text[at : at + 1] != "]":
                self._require_cut(text, at, count, "there is neither ',' nor ']' behind an event")
                return
        if text[at + 1 :].strip():
            raise TraceError(str(self.path), f"{_place(text, at + 1)}: there is more behind the end of the array")

    def _require_cut(self, text: str, at: int, count: int, problem: str) -> None:
        if "\n" in text[at:]:
            raise TraceError(str(self.path), f"damaged at {_place(text, at)}: {problem}")
        self.warnings.append(f"{self.path}: cut off at {_place(text, at)}; the {count} events before it are read")

    def _merged(self, text: str) -> Iterator[object]:
        try:
            whole = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise TraceError(str(self.path), f"damaged: {error}") from error
        events = whole.get("traceEvents")
        if not isinstance(events, list):
            raise TraceError(str(self.path), "not a timeline: there are no traceEvents")
        yield from events

    def _take(self, event: object) -> None:
        if not isinstance(event, dict):
            raise ValueError("is no JSON object")
        rank = _whole(event, "pid")
        trace = self._ranks.setdefault(rank, RankTrace(rank))
        phase, name = event.get("ph"), event.get("name")
        if not isinstance(phase, str) or not isinstance(name, str):
            raise ValueError("has no ph or no name that is a text")
        name = own_name(name)
        if phase == "M":
            _take_metadata(trace, name, event)
        elif phase != "X":
            _time(event, "ts")
            trace.others.append({**event, "name": name})
        else:
            track, begin, duration = _whole(event, "tid"), _time(event, "ts"), _time(event, "dur")
            if duration < 0:
                raise ValueError("dur is negative")
            if name == NEGOTIATE:
                self._asked[rank, track] = begin, begin + duration, begin + duration
                return
            asked, agreed, due = self._asked.pop((rank, track), (None, begin, begin))
            if abs(due - begin) > _NEAR:
                asked, agreed = None, begin
            if name == QUEUE:
                self._asked[rank, track] = asked, begin, begin + duration
            else:
                operation = _operation(trace, event, name, track, begin, begin + duration)
                queued = begin - agreed if agreed < begin - _NEAR else 0
                trace.operations.append(operation._replace(asked=asked, queued=queued))


def _take_metadata(trace: RankTrace, name: str, event: dict[str, object]) -> None:
    args = _args(event)
    if name == "process_name":
        host, size = args.get("host"), args.get("size")
        trace.host = host if isinstance(host, str) else None
        trace.size = size if isinstance(size, int) else None
    elif name == "thread_name":
        trace.tracks[_whole(event, "tid")] = _text(args, "name")


def _operation(trace: RankTrace, event: dict[str, object], kind: str, track: int, begin: int, end: int) -> Operation:
    args = _args(event)
    tensor = _text(args, "tensor")
    shown = trace.tracks.setdefault(track, tensor)
    algorithm = _text(args, "algorithm") if "algorithm" in args else ""
    return Operation(shown, tensor, kind, None, begin, end, _whole(args, "bytes"), algorithm=algorithm)


def _args(event: dict[str, object]) -> dict[str, object]:
    args = event.get("args", {})
    if not isinstance(args, dict):
        raise ValueError("args is no JSON object")
    return args


def _text(fields: dict[str, object], key: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a text, got {value!r:.40}")
    return value


def _whole(fields: dict[str, object], key: str) -> int:
    value = fields.get(key)
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"{key} must be a whole number >= 0, got {value!r:.40}")
    return value


def _time(fields: dict[str, object], key: str) -> int:
    """Read microseconds as nanoseconds."""
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _MOST / 1000:
        raise ValueError(f"{key} must be a number of microseconds, got {value!r:.40}")
    return round(value * 1000)


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return at if space is None else space.end()


def _place(text: str, at: int) -> str:
    return f"line {text.count(chr(10), 0, at) + 1}, column {at - text.rfind(chr(10), 0, at)}"


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")
