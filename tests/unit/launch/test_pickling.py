"""What is in a pickled call, and which part of it cannot be sent."""

import functools
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from farandole.errors import PicklingError
from farandole.launch.pickling import describe, dump, dump_call, find_unpicklable

COUNT = 3


def local(source: str, **names: object) -> Callable[..., Any]:
    """A function that only its module `__main__` knows, as a notebook's are: pickled by value."""
    namespace: dict[str, Any] = {"__name__": "__main__", **names}
    exec(source, namespace)
    function: Callable[..., Any] = namespace["main"]
    return function


class Model:
    def __init__(self) -> None:
        self.layers = [{}, {"lock": threading.Lock()}]


def closure() -> Callable[[], object]:
    lock = threading.Lock()

    def main() -> object:
        return lock

    return main


LOCK = "TypeError: cannot pickle '_thread.lock' object"


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (closure(), "it's closure variable 'lock'"),
        (local("def main(): return state", state={"a": [threading.Lock()]}), "it's global 'state'['a'][0]"),
        (local("def main(x, y=lock): pass", lock=threading.Lock()), "it's default for 'y'"),
        (local("def main(*, y=lock): pass", lock=threading.Lock()), "it's default for 'y'"),
        (local("def main(): return [lock for _ in 'a']", lock=threading.Lock()), "it's global 'lock'"),
        (Model(), "it.layers[1]['lock']"),
        (Model().__init__, "it's object.layers[1]['lock']"),
        (functools.partial(print, threading.Lock()), "it.args[0]"),
        (functools.partial(print, end=threading.Lock()), "it.keywords['end']"),
        (threading.Lock(), "it"),
        ((1, threading.Lock()), "it[1]"),
        (type("Local", (), {"__module__": "__main__", "lock": threading.Lock()}), "it.lock"),
    ],
)
def test_path(value: object, path: str) -> None:
    assert find_unpicklable(value, "it") == (path, LOCK)


def test_what_can_be_pickled() -> None:
    assert find_unpicklable({"a": np.int64(3), "f": local("def main(): return 1")}, "it") is None


def test_an_object_that_contains_itself() -> None:
    loop: list[object] = [threading.Lock()]
    loop.insert(0, loop)
    assert find_unpicklable(loop, "it") == ("it[1]", LOCK)


@pytest.mark.parametrize(
    ("args", "kwargs", "what", "path"),
    [
        ((1, threading.Lock()), {}, "args", "args[1]"),
        ((), {"data": Model()}, "kwargs", "kwargs['data'].layers[1]['lock']"),
    ],
)
def test_call(args: tuple[object, ...], kwargs: dict[str, object], what: str, path: str) -> None:
    with pytest.raises(PicklingError) as caught:
        dump_call(closure.__class__, args, kwargs)
    assert caught.value.args == (what, path, LOCK)


def test_function_of_a_call() -> None:
    with pytest.raises(PicklingError, match="cannot send main to the ranks: main's closure variable 'lock' cannot"):
        dump_call(closure(), (), {})


def test_round_trip() -> None:
    fn, args, kwargs = pickle.loads(dump_call(local("def main(x, y): return x + y + z", z=np.int32(4)), (1,), {"y": 2}))
    assert fn(*args, **kwargs) == 7
    assert pickle.loads(dump([1], "it")) == [1]


def test_describe() -> None:
    source = "def main(x):\n global seen\n seen = rate * x.size\n return [scale for _ in range(missing)]"
    main = local(source, rate=2.0, scale=3, size=4)
    report = describe(main, dump_call(main, (), {}))
    assert report.globals == ("missing", "rate", "scale", "seen")
    assert 100 < report.size < 10_000
    assert describe(functools.partial(len), b"").globals == ()
    main = local("def main(): return data", data=b"x" * 1_000_000)
    big = describe(main, dump_call(main, (), {}))
    assert big.size > 1_000_000


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^ranks run a function, got 5$"):
        dump_call(5, (), {})  # type: ignore[arg-type]
