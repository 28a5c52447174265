"""Samples in files that are not tables: each once per epoch, in one order, whatever ranks read and when they end."""

import io
import json
import os
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")
pytest.importorskip("PIL", reason="no images without Pillow")

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from pyarrow import feather

from farandole.data import ArrowSource, CachedSource, FieldOptions, FileSource, Loader, ParquetSource, Reading, files
from farandole.data.formats.source import LEAST_WINDOW, DerivedSource
from farandole.data.loading.rounds import RowGroupReader
from farandole.errors import ConfigError, DataError, SourceError

KINDS = ("images", "jsonl", "tar", "text", "bytes")


def image(number: int, size: tuple[int, int] = (2, 3)) -> bytes:
    written = io.BytesIO()
    Image.fromarray(np.full((*size, 3), number % 256, np.uint8)).save(written, "png")
    return written.getvalue()


def write(folder: Path, kind: str, counts: list[int]) -> int:
    """Write files with these numbers of samples, which are numbered on; return how many there are."""
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    for place, count in enumerate(counts):
        numbers = range(first, first + count)
        first += count
        if kind == "jsonl":
            text = "".join(json.dumps({"row": number, "x": [number] * 3}) + "\n" for number in numbers)
            (folder / f"{place}.jsonl").write_text(text + "\n")
        elif kind == "text":
            (folder / f"{place}.txt").write_text("\n".join(map(str, numbers)))
        elif kind == "tar":
            with tarfile.open(folder / f"{place:02}.tar", "w") as shard:
                for number in numbers:
                    for extension, content in (("cls", str(number).encode()), ("png", image(number))):
                        member = tarfile.TarInfo(f"at/{number:05}.{extension}")
                        member.size = len(content)
                        shard.addfile(member, io.BytesIO(content))
        else:
            (folder / f"class{place}").mkdir(exist_ok=True)
            for number in numbers:
                ending, content = ("png", image(number)) if kind == "images" else ("bin", str(number).encode())
                (folder / f"class{place}" / f"{number}.{ending}").write_bytes(content)
    return first


def number_of(sample: dict[str, Any]) -> Mapping[str, Any]:
    """Return the number of a sample of any kind."""
    if "text" in sample:
        return {"row": int(sample["text"])}
    if "cls" in sample:
        return {"row": int(sample["cls"])}
    if "row" in sample:
        return {"row": sample["row"], "x": np.array(sample["x"], np.float32)}
    return {"row": int(Path(sample["path"]).stem)}


def opened(folder: Path, kind: str) -> FileSource:
    return files(str(folder), format=None if kind != "bytes" else "bytes", decode=number_of)


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any),
    jobs=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=4),
)
def test_each_sample_once_with_kills_and_other_numbers_of_ranks(
    kind: str, counts: list[int], jobs: list[tuple[int, int, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        total = write(Path(folder), kind, counts)
        source = opened(Path(folder), kind)
        seen: list[int] = []
        state = None
        for size, batch_size, most_steps in [*jobs, (2, 3, 99)]:
            states = []
            for rank in range(size):
                loader = Loader(source, batch_size=batch_size, policy="join", rank=rank, size=size)
                if state is not None:
                    loader.load_state_dict(state)
                    if loader.epoch:
                        break
                steps = min(most_steps, len(loader))
                for batch in (next(each) for each in [iter(loader)] for _ in range(steps)):
                    seen += batch["row"].tolist()  # type: ignore[union-attr]
                states.append(loader.state_dict())
            assert all(each == states[0] for each in states)
            state = states[0] if states else state
        assert sorted(seen) == list(range(total))


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_does_not_depend_on_the_number_of_ranks(tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind, [40, 30, 26])
    source = opened(tmp_path, kind)

    def steps(size: int) -> list[set[int]]:
        ranks = [Loader(source, batch_size=12 // size, policy="drop", rank=rank, size=size) for rank in range(size)]
        return [
            {row for batch in batches for row in batch["row"].tolist()}  # type: ignore[union-attr]
            for batches in zip(*ranks, strict=True)
        ]

    assert steps(1) == steps(2) == steps(4)
    assert steps(1)[0] != set(range(12))


def test_images_have_the_classes_of_their_folders(tmp_path: Path) -> None:
    write(tmp_path, "images", [2, 3])
    (tmp_path / "class1" / "notes.md").write_text("no image")
    source = files(str(tmp_path), format="images")
    assert source.classes == ("class0", "class1")
    loader = Loader(source, batch_size=5, policy="drop", reading=Reading(shuffle=False))
    (batch,) = loader
    assert loader.kinds == {"image": "uint8[2, 3, 3]", "label": "int64"}
    assert batch["image"][:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]  # type: ignore[index, union-attr]
    assert batch["label"].tolist() == [0, 0, 1, 1, 1]  # type: ignore[union-attr]
    assert batch["image"].flags.writeable  # type: ignore[union-attr]
    resized = next(iter(Loader(files(str(tmp_path), format="images", size=(8, 4)), batch_size=5, policy="drop")))
    assert resized["image"].shape == (5, 8, 4, 3)  # type: ignore[union-attr]


def test_tar_shards_have_columns_by_extension(tmp_path: Path) -> None:
    write(tmp_path, "tar", [70, 2])
    source = files(str(tmp_path))
    assert [group.rows for group in source.row_groups] == [64, 6, 2]
    batch = next(iter(Loader(source, batch_size=72, policy="drop", reading=Reading(shuffle=False))))
    assert sorted(batch) == ["cls", "key", "png"]
    assert batch["cls"].tolist() == list(range(72))  # type: ignore[union-attr]
    assert batch["key"][71] == "at/00071"  # type: ignore[index]
    assert batch["png"].shape == (72, 2, 3, 3)  # type: ignore[union-attr]


def test_decode_runs_in_processes_too(tmp_path: Path) -> None:
    write(tmp_path, "jsonl", [5, 4])
    reading = Reading(processes=True, workers=1)
    rows = [
        row
        for batch in Loader(opened(tmp_path, "jsonl"), batch_size=4, policy="join", reading=reading)
        for row in batch["row"].tolist()
    ]  # type: ignore[union-attr]
    assert sorted(rows) == list(range(9))


def test_arrays_of_several_lengths_are_ragged(tmp_path: Path) -> None:
    write(tmp_path, "text", [6])
    source = files(str(tmp_path), decode=lambda sample: {"ids": np.arange(int(sample["text"]), dtype=np.int32)})
    reading = Reading(shuffle=False, fields=FieldOptions(ragged=["ids"]))
    (batch,) = Loader(source, batch_size=6, policy="drop", reading=reading)
    assert [row.tolist() for row in batch["ids"].rows()] == [list(range(n)) for n in range(6)]  # type: ignore[union-attr]


class ByTable(DerivedSource):
    """A source whose columns are converted from Arrow's, as those of a cache are."""

    least_window = LEAST_WINDOW


@pytest.mark.parametrize("shuffle", [False, True])
def test_columns_are_those_of_the_table_and_the_batch_s_own(tmp_path: Path, shuffle: bool) -> None:
    write(tmp_path, "bytes", [4, 3])
    shared = np.arange(6, dtype=np.int16).reshape(2, 3)

    def decode(sample: dict[str, Any]) -> Mapping[str, Any]:
        number = int(sample["data"])
        return {
            "image": shared,
            "other": shared * number,
            "row": number,
            "text": str(number),
            "ids": np.arange(3.0),
        } | {
            "odd": number % 2 == 1,
            "half": number / 2,
            "small": np.int8(number),
        }

    source = files(str(tmp_path), format="bytes", decode=decode)
    reading = Reading(shuffle=shuffle)
    found, expected = (
        list(Loader(each, batch_size=3, policy="join", reading=reading)) for each in (source, ByTable(source))
    )
    for one, other in zip(found, expected, strict=True):
        for name, values in one.items():
            assert isinstance(values, np.ndarray)
            assert values.dtype == other[name].dtype  # type: ignore[union-attr]
            assert values.tolist() == other[name].tolist()  # type: ignore[union-attr]
    found[0]["image"][:] = 7  # type: ignore[index]
    assert shared.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_samples_unlike_the_first_are_named_by_either_way(tmp_path: Path) -> None:
    write(tmp_path, "bytes", [3])
    shapes = {"0": (2, 2), "1": (2, 2), "2": (4, 1)}
    for unlike in (
        lambda data: {"x": np.zeros(shapes[data])},
        lambda data: {"x": np.zeros((2, 2), "f4" if data == "2" else "f8")},
        lambda data: {"x": {"0": 1, "1": 2, "2": 2**70}[data]},
        lambda data: {"x": {"0": 1, "1": 2, "2": "two"}[data]},
        lambda data: {"x": 1, "y": 2} if data != "2" else {"x": 1},
    ):
        source = files(
            str(tmp_path), format="bytes", decode=lambda sample, unlike=unlike: unlike(sample["data"].decode())
        )
        texts = []
        for each in (source, ByTable(source)):
            with pytest.raises(DataError, match=r"2\.bin has ") as failed:
                list(Loader(each, batch_size=3, policy="join", reading=Reading(shuffle=False)))
            texts.append(failed.value.problem.rpartition("class0")[2])
        assert texts[0] == texts[1]


def test_names_choose_files(tmp_path: Path) -> None:
    write(tmp_path, "bytes", [3, 3])
    for where in ("*/class1/*", ["3.bin", "4.bin", "5.bin"], lambda path: "class1" in path):
        assert [group.file.path[-5:] for group in files(str(tmp_path), format="bytes", where=where).row_groups] == [
            "3.bin",
            "4.bin",
            "5.bin",
        ]
    with pytest.raises(SourceError, match="holds no file that `where` chooses"):
        files(str(tmp_path), format="bytes", where="nothing")


@pytest.mark.parametrize("change", ["changed", "vanished"])
@pytest.mark.parametrize("kind", ["images", "jsonl"])
def test_a_file_that_does_not_stay_is_named(tmp_path: Path, kind: str, change: str) -> None:
    write(tmp_path, kind, [4, 4])
    loader = Loader(
        opened(tmp_path, kind),
        batch_size=1,
        policy="drop",
        reading=Reading(shuffle=False, workers=0, ahead=0, window=1),
    )
    batches = iter(loader)
    next(batches)
    spoiled = next(path for path in sorted(tmp_path.rglob("*")) if path.name in ("6.png", "1.jsonl"))
    if change == "changed":
        spoiled.write_bytes(spoiled.read_bytes() + b" ")
    else:
        spoiled.unlink()
    text = "has changed while it was being read" if change == "changed" else "vanished since it was listed"
    with pytest.raises(SourceError, match=f"{spoiled.name}: .*{text}"):
        list(batches)
    assert loader.epoch == 0


@pytest.mark.parametrize("content", [b"0123\n", b"0\n12\n", b" " * 5])
def test_a_file_with_other_samples_is_named_even_if_size_and_time_are_the_same(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "0.jsonl"
    path.write_bytes(b"1\n2\n3")
    source = files(str(path), format="text")
    changed = path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=(changed, changed))
    with pytest.raises(
        SourceError, match=r"block 0 has \d samples, and had 3 when it was opened; has the file changed\?"
    ):
        list(Loader(source, batch_size=1, policy="drop"))
    with pytest.raises(SourceError, match="block 0 has 0 samples"):
        next(source._decoded(source.row_groups[0], b""))


@pytest.mark.parametrize("processes", [False, True])
def test_of_files_read_together_the_one_that_does_not_stay_is_named(tmp_path: Path, processes: bool) -> None:
    for change in ("changed", "grown", "vanished"):
        write(tmp_path / change, "images", [8])
        source = files(str(tmp_path / change))
        spoiled = tmp_path / change / "class0" / "3.png"
        content = spoiled.read_bytes()
        if change == "vanished":
            spoiled.unlink()
        else:
            spoiled.write_bytes(content[::-1] if change == "changed" else content + b" ")
        pieces = RowGroupReader(source, ()).each(range(8))
        assert [isinstance(each, SourceError) for each in pieces] == [number == 3 for number in range(8)]
        text = "vanished since it was listed" if change == "vanished" else "has changed while it was being read"
        reading = Reading(shuffle=False, workers=1, processes=processes)
        with pytest.raises(SourceError, match=rf"3\.png: .*{text}"):
            list(Loader(source, batch_size=4, policy="drop", reading=reading))


def test_small_files_are_read_together_and_large_ones_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [1, 300, 2, 400, 3]
    for place, size in enumerate(sizes):
        (tmp_path / f"{place}.bin").write_bytes(b"x" * size)
    source = files(str(tmp_path), format="bytes", decode=lambda sample: {"size": len(sample["data"])})
    monkeypatch.setattr("farandole.data.formats.samples._SMALL_BYTES", 256)
    assert [content and len(content) for content in source.contents(source.row_groups)] == [1, None, 2, None, 3]
    (batch,) = Loader(source, batch_size=5, policy="drop", reading=Reading(shuffle=False))
    assert batch["size"].tolist() == sizes  # type: ignore[union-attr]


def test_images_may_be_transposed(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(image(number, (90, 70)))
    source = files(str(tmp_path), format="bytes", decode=lambda sample: {"x": pixels(sample["data"])})
    (batch,) = Loader(source, batch_size=3, policy="drop", reading=Reading(shuffle=False))
    assert batch["x"].shape == (3, 3, 90, 70)  # type: ignore[union-attr]
    assert batch["x"][:, 2, 89, 69].tolist() == [0, 1, 2]  # type: ignore[index, union-attr]


def pixels(data: bytes) -> NDArray[np.uint8]:
    """Return an image as channels, rows, columns, as torch wants it."""
    return np.asarray(Image.open(io.BytesIO(data))).transpose(2, 0, 1)


def test_a_cache_holds_decoded_samples(tmp_path: Path) -> None:
    write(tmp_path / "far", "jsonl", [5])
    decoded: list[int] = []

    def decode(sample: dict[str, Any]) -> Mapping[str, Any]:
        decoded.append(sample["row"])
        return {"row": sample["row"]}

    source = CachedSource(files(str(tmp_path / "far"), decode=decode), tmp_path / "cache", 1 << 20)
    decoded.clear()
    loader = Loader(source, batch_size=5, policy="drop")
    for _ in range(3):
        list(loader)
    assert decoded == list(range(5))


def test_images_of_other_sizes_and_classes_are_cached_apart(tmp_path: Path) -> None:
    write(tmp_path / "far", "images", [0, 1])
    for size, classes in ((2, ["class1"]), (4, ["class1"]), (4, ["class0", "class1"])):
        if len(classes) == 2:
            (tmp_path / "far" / "class0" / "9.png").write_bytes(image(9))
        source = CachedSource(files(str(tmp_path / "far"), size=(size, size)), tmp_path / "cache", 1 << 20)
        (batch,) = Loader(source, batch_size=2, policy="join", reading=Reading(shuffle=False))
        assert batch["image"].shape[1] == size  # type: ignore[union-attr]
        assert batch["label"].tolist() == [*range(len(classes))]  # type: ignore[union-attr]


def test_faults_of_samples_and_settings_are_named(tmp_path: Path) -> None:
    write(tmp_path / "images", "images", [2])
    write(tmp_path / "text", "text", [2])
    with pytest.raises(ConfigError, match="format: must be one of bytes, images, jsonl, tar, text, got 'xml'"):
        files(str(tmp_path), format="xml")
    with pytest.raises(DataError, match=r"files end in \.png, \.txt; say format="):
        files(str(tmp_path))
    with pytest.raises(DataError, match=r"column 'x': .*no column holds dict"):
        files(str(tmp_path / "text"), decode=lambda sample: {"x": {}})
    with pytest.raises(ZeroDivisionError) as failed:
        files(str(tmp_path / "text"), decode=lambda sample: {"x": 1 / 0})
    assert "in decoding line 1" in failed.value.__notes__[0]
    (tmp_path / "images" / "class0" / "9.png").write_bytes(image(9, (5, 5)))
    with pytest.raises(DataError, match=r"9.png has uint8\[5, 5, 3\], and the first sample has uint8\[2, 3, 3\]"):
        list(Loader(files(str(tmp_path / "images")), batch_size=1, policy="drop"))
    (tmp_path / "images" / "class0" / "9.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"9.png: cannot be decoded"):
        list(Loader(files(str(tmp_path / "images")), batch_size=1, policy="drop"))


def test_paths_and_folders_of_flyte_are_opened_where_they_lie(tmp_path: Path) -> None:
    class Remote:
        """A folder of a store, as flytekit's FlyteDirectory."""

        remote_source = str(tmp_path / "there it is")

        def __fspath__(self) -> str:
            raise AssertionError("this downloads all files")

    there = tmp_path / "there it is"
    count = write(there, "text", [3, 2])
    pq.write_table(pa.table({"n": range(count)}), there / "rows.parquet")
    feather.write_feather(pa.table({"n": range(count)}), there / "rows.arrow")
    for place in (Remote(), there):
        assert sum(group.rows for group in files(place, format="text", where="*.txt").row_groups) == count
        for source in (ParquetSource(place), ArrowSource(place), ParquetSource([there / "rows.parquet"])):
            assert sum(group.rows for group in source.row_groups) == count


def test_opening_decodes_one_sample(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"row": 1}\n' * 50)
    seen: list[int] = []
    files(str(tmp_path), decode=lambda sample: {"row": seen.append(1) or sample["row"]})  # type: ignore[func-returns-value]
    assert len(seen) == 1
