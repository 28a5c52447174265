"""Objects whose classes are in the file that the ranks run, which pickle knows as `__main__`."""

import sys
from pathlib import Path

from system.launched import farandole

PROGRAM = """
import dataclasses
import enum

import numpy as np

import farandole.numpy as hvd


class Mode(enum.Enum):
    TRAIN = 1
    TEST = 2


@dataclasses.dataclass
class Point:
    x: int
    mode: Mode = Mode.TEST

    class Part:
        number = 3


hvd.init()
rank = hvd.rank()
assert hvd.broadcast_object(Mode.TRAIN, 1) is Mode.TRAIN
points = hvd.allgather_object(Point(rank))
assert points == [Point(0), Point(1)] and {type(each) for each in points} == {Point}
assert hvd.broadcast_object({"a": [Point.Part, Point(5)]}, 0) == {"a": [Point.Part, Point(5)]}


def local():
    class Local:
        number = 4

    return Local()


assert hvd.broadcast_object(local() if rank == 0 else None, 0).number == 4
if rank == 0:

    class First:
        number = 7

assert hvd.broadcast_object(First() if rank == 0 else None, 0).number == 7
assert hvd.allgather_object(lambda: rank)[1]() == 1
print("done")
"""


def test_received_objects_have_the_classes_of_the_rank(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = farandole("run", "-np", "2", sys.executable, str(program))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2
