"""Keys of the functions that decode samples."""

import functools
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from farandole.data.formats.function_keys import key_of
from helpers import programs

# A script with all that a function may refer to: closures, classes of `__main__`, sets, and itself.
SCRIPT = """
import enum, functools, json, logging, re
from dataclasses import dataclass
from functools import cached_property
from posixpath import basename
from farandole.data.formats.function_keys import key_of

log, words, pattern = logging.getLogger(__name__), {"cat", "dog", "bird"}, re.compile("a+")

class Kind(enum.Enum):
    CAT, DOG = "cat", "dog"

kinds, both = {Kind.DOG, Kind.CAT}, {Kind: {("a", Kind.CAT), ("b", Kind.DOG)}}

@dataclass
class Scale:
    by: int = 2
    @property
    def twice(self): return 2 * self.by
    @cached_property
    def thrice(self): return self.twice + self.by
    @classmethod
    def one(cls): return cls(1)
    def __call__(self, sample): return decode(sample)

@functools.cache
def helper(depth):
    return helper(depth - 1) if depth else {known for known in words if known in ("cat", "dog")}

again = {helper, Scale.one}

def logged(level):
    def wrap(function):
        @functools.wraps(function)
        def wrapper(sample): return log.log(level, basename(sample["path"])) or function(sample)
        return wrapper
    return wrap

@logged(10)
def decode(sample, kind=Kind.CAT):
    if sample["text"] in {"one", "two", "three"} and pattern.match(json.dumps(sample)):
        return {"row": Scale(3).twice, "again": [each for each in again], "both": both}
    return {"row": len(helper(3)), "kind": kind in kinds}
"""
ALL = "decode, Scale(5), Scale(5).__call__, functools.partial(decode, kind=Kind.DOG), Scale.one, helper"


# Pairs of a text of the script and its replacement.
EDITS = [
    ('{"one", "two", "three"}', '{"one", "two", "four"}'),
    ('"dog", "bird"}', '"dog", "fish"}'),
    ('"a+"', '"b+"'),
    ('CAT, DOG = "cat", "dog"', 'CAT, DOG = "cat", "god"'),
    ("by: int = 2", "by: int = 4"),
    ("2 * self", "3 * self"),
    ("self.twice + self.by", "self.twice - self.by"),
    ("cls(1)", "cls(2)"),
    ("depth - 1", "depth - 2"),
    ("@logged(10)", "@logged(20)"),
    ("kind=Kind.CAT):", "kind=Kind.DOG):"),
    ("len(helper", "max(helper"),
    ("import basename", "import dirname as basename"),
    ("json, logging", "pickle as json, logging"),
    ("Scale(3)", "Scale(4)"),
    ("{helper, Scale.one}", "{helper}"),
]


def program(scripts: list[str], asked: str) -> list[str]:
    """Return a command that prints the keys of the functions `asked` after each of the scripts."""
    return [sys.executable, "-c", f"for text in {scripts!r}:\n    exec(text)\n    print(*map(key_of, [{asked}]))"]


def keys(scripts: list[str], asked: str, seed: int) -> list[str]:
    """Return the keys of the functions `asked` after each of the scripts, in a process of its own."""
    command, env = program(scripts, asked), {"PYTHONHASHSEED": str(seed)}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()


def test_keys_are_the_same_in_every_process() -> None:
    first = keys([SCRIPT], ALL, seed=1)
    assert len(set(first)) == 6 and keys([SCRIPT], ALL, seed=2) == first


def test_tensors_of_torch_count_with_their_values() -> None:
    pytest.importorskip("torch")
    script = "import torch\nfrom farandole.data.formats.function_keys import key_of\ntorch.manual_seed(0)\n"
    tensors = ["torch.ones(2)", "torch.ones(2, 1)", "torch.ones(2).double()", "torch.ones(4)[1:3]", "torch.zeros(2)"]
    tensors += ["torch.ones(3, dtype=torch.bfloat16)", "torch.tensor(1j).conj()", "torch.tensor(1j)", "torch.eye(2)"]
    tensors += ["torch.eye(2).to_sparse()", "torch.nn.Linear(2, 3)", "torch.nn.Linear(2, 3)", "torch.empty(0)"]
    asked = ", ".join(f"lambda sample, held={each}: held * sample" for each in tensors)
    done = [programs.run(program([script], asked)) for _ in range(2)]
    first, second = (each.stdout.split() for each in done)
    assert first == second, done[0].stderr
    assert first[3] == first[0] and len(set(first)) == len(tensors) - 1


def test_edits_change_keys() -> None:
    scripts = [SCRIPT, *(SCRIPT.replace(old, new) for old, new in EDITS)]
    assert len(set(scripts)) == len(scripts)
    assert len(set(keys(scripts, "decode", seed=1))) == len(scripts)


def scaled(factor: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda sample: {"row": factor * int(sample["text"])}


LIMIT = 3


def limited(sample: dict[str, Any]) -> dict[str, Any]:
    return {"row": sample["text"][:LIMIT], "with": checked(sample)}


def checked(sample: dict[str, Any]) -> int:
    return len(sample)


def test_closures_arguments_and_states_are_told_apart() -> None:
    assert key_of(scaled(1)) == key_of(scaled(1)) != key_of(scaled(2))
    assert key_of(functools.partial(int, base=2)) != key_of(functools.partial(int, base=8))


def test_an_imported_function_counts_with_its_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    first = key_of(limited)
    with monkeypatch.context() as changed:
        changed.setitem(globals(), "LIMIT", 4)
        assert key_of(limited) != first
    with monkeypatch.context() as changed:
        changed.setattr(checked, "__code__", (lambda sample: 2 * len(sample)).__code__)
        assert key_of(limited) != first
    assert key_of(limited) == first


def test_what_no_process_can_tell_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot pickle"):
        key_of(lambda sample: {"row": lock})
