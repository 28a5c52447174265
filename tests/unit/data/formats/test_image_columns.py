"""Images in the columns in which Hugging Face stores them, in Parquet files and folders of save_to_disk."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")
pytest.importorskip("PIL", reason="no images without Pillow")

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from farandole.data import CachedSource, FieldOptions, Loader, ParquetSource, Reading
from farandole.errors import ConfigError, DataError

STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def stored(number: int, shape: tuple[int, int] = (2, 3), **options: Any) -> dict[str, Any]:
    written = io.BytesIO()
    Image.fromarray(np.full((*shape, 3), number, np.uint8)).save(written, "png", **options)
    return {"bytes": written.getvalue(), "path": f"{number}.png"}


def write(path: Path, images: list[Any], kind: pa.DataType = STRUCT, rows: int = 4) -> ParquetSource:
    columns = {"image": pa.array(images, kind), "label": list(range(len(images)))}
    pq.write_table(pa.table(columns), path, row_group_size=rows)
    return ParquetSource(path)


def read(source: Any, rows: int, **options: Any) -> Any:
    reading = Reading(shuffle=False, fields=FieldOptions(**options))
    (batch,) = Loader(source, batch_size=rows, policy="drop", reading=reading)
    return batch["image"]


@pytest.mark.parametrize("form", ["parquet", "saved", "cached"])
def test_images_are_decoded(tmp_path: Path, form: str) -> None:
    images = [stored(number) for number in range(10)]
    source: Any = write(tmp_path / "x.parquet", images)
    if form == "cached":
        source = CachedSource(source, tmp_path / "cache", 1 << 20)
        read(source, 10)
    elif form == "saved":
        table = pq.read_table(tmp_path / "x.parquet")
        folder = tmp_path / "saved"
        folder.mkdir()
        with pa.OSFile(str(folder / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
        source = ParquetSource(folder)
    found = read(source, 10)
    assert (found.dtype, found.shape) == (np.uint8, (10, 2, 3, 3))
    assert found[:, 1, 2, 0].tolist() == list(range(10))
    assert read(source, 10, images={"image": (4, 5)}).shape == (10, 4, 5, 3)
    shuffled = [row for batch in Loader(source, batch_size=3, policy="join") for row in batch["image"][:, 0, 0, 0]]  # type: ignore[call-overload, index]
    assert sorted(shuffled) == list(range(10))


def test_images_are_turned_unless_switched_off(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    source = write(tmp_path / "x.parquet", [stored(1, exif=exif)])
    assert read(source, 1).shape == (1, 3, 2, 3)
    assert read(source, 1, orient=False).shape == (1, 2, 3, 3)


@pytest.mark.parametrize(
    ("unlike", "problem"),
    [
        (stored(9, (5, 5)), r"row 2 has height and width \(5, 5\), and the first row \(2, 3\); resize them: images="),
        ({"bytes": b"no", "path": "9.png"}, r"row 2 \(9\.png\) cannot be decoded: .*leave the column out"),
        ({"bytes": None, "path": "9.png"}, r"row 2 \(9\.png\) has no bytes, only a path; read image files"),
        (None, "1 of 4 rows are null"),
    ],
)
def test_an_image_unlike_the_others_is_named(tmp_path: Path, unlike: Any, problem: str) -> None:
    images = [stored(number) for number in range(8)]
    source = write(tmp_path / "x.parquet", [*images[:6], unlike, images[7]])
    with pytest.raises(DataError, match=rf"column 'image': row group 1 of .*x\.parquet: {problem}"):
        read(source, 8)


def test_fields_in_another_order_and_large_types_are_images_too(tmp_path: Path) -> None:
    kind = pa.struct([("path", pa.large_string()), ("bytes", pa.large_binary())])
    assert read(write(tmp_path / "x.parquet", [stored(7)], kind), 1)[0, 0, 0].tolist() == [7, 7, 7]
    other = pa.struct([("bytes", pa.binary()), ("path", pa.int64())])
    with pytest.raises(DataError, match="no tensor holds struct"):
        Loader(write(tmp_path / "y.parquet", [None], other), columns=["image"], batch_size=1, policy="drop")
    with pytest.raises(ConfigError, match="images: 'picture' is not among the columns"):
        read(write(tmp_path / "x.parquet", [stored(7)]), 1, images={"picture": (2, 2)})
