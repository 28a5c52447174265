"""Images of all of Pillow's modes, and images that no Pillow decodes."""

import io
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")
pytest.importorskip("PIL", reason="no images without Pillow")

from PIL import Image

from farandole.data import Loader, files
from farandole.data.formats.images import decode_image
from farandole.errors import DataError

RAMP = np.arange(0, 1 << 16, 16, np.uint16).reshape(64, 64)


def saved(image: Image.Image, form: str, **options: object) -> bytes:
    written = io.BytesIO()
    image.save(written, form, **options)
    return written.getvalue()


def decoded(data: bytes) -> NDArray[np.uint8]:
    made = decode_image(data, "image", None)
    assert (made.dtype, made.shape[2]) == (np.uint8, 3)
    return made


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM", "JPEG2000", "big-endian TIFF"])
def test_the_upper_bits_of_16_bits_are_kept(form: str) -> None:
    image = Image.fromarray(RAMP)
    if form.startswith("big"):
        image, form = Image.frombytes("I;16B", (64, 64), RAMP.astype(">u2").tobytes()), "TIFF"
    assert (decoded(saved(image, form)) == (RAMP >> 8)[..., np.newaxis]).all()


def test_12_bits_are_scaled_to_their_own_range() -> None:
    pixels = bytes.fromhex("000 fff 800 7ff".replace(" ", ""))
    tags = {256: 2, 257: 2, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: 2, 279: len(pixels)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    data = b"II*\0" + struct.pack("<I", 8 + len(pixels)) + pixels + struct.pack("<H", len(tags)) + entries + b"\0" * 4
    assert decoded(data)[..., 0].tolist() == [[0, 255], [128, 127]]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_numbers_of_unknown_range_are_refused_with_the_file(tmp_path: Path, mode: str) -> None:
    (tmp_path / "a").mkdir()
    Image.fromarray(RAMP.astype("i4" if mode == "I" else "f4")).save(tmp_path / "a" / "x.tif")
    with pytest.raises(DataError, match=rf"a/x\.tif: cannot be decoded: .*known range .*{mode}\); scale them to 8"):
        files(str(tmp_path))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "PA", "P", "RGBA", "CMYK", "YCbCr", "LAB"])
def test_other_modes_keep_their_colours(mode: str) -> None:
    gray = Image.fromarray((RAMP >> 8).astype(np.uint8))
    image = Image.merge("LAB", [gray, *[Image.new("L", gray.size, 128)] * 2]) if mode == "LAB" else gray.convert(mode)
    found = decoded(saved(image, "TIFF")).astype(int)
    wanted = np.asarray(image.convert("L")) if mode == "1" else np.asarray(gray).astype(int)
    assert np.abs(found - wanted[..., np.newaxis]).max() <= (20 if mode == "LAB" else 1)


def test_transparency_of_a_palette_is_dropped() -> None:
    image = Image.fromarray(np.array([[0, 1]], np.uint8)).convert("P")
    image.putpalette([255, 0, 0, 0, 0, 255])
    assert decoded(saved(image, "PNG", transparency=0)).tolist() == [[[255, 0, 0], [0, 0, 255]]]


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_by_their_orientation_unless_switched_off(form: str, orientation: int) -> None:
    upright = np.repeat(np.repeat(np.array([[250, 5], [120, 60], [180, 30]], np.uint8), 8, 0), 8, 1)
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: np.rot90(upright),
        7: upright[::-1, ::-1].T,
        8: np.rot90(upright, 3),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(Image.fromarray(np.ascontiguousarray(stored)), form, quality=95, exif=exif)
    for orient, wanted in ((True, upright), (False, stored)):
        for size in (None, wanted.shape):
            found = decode_image(data, "image", size, orient=orient)[..., 0].astype(int)
            assert found.shape == wanted.shape
            assert np.abs(found - wanted).max() < 12


def test_files_and_members_of_shards_are_turned_unless_switched_off(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(Image.fromarray(RAMP[:, :32]), "PNG", exif=exif)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(data)
    with tarfile.open(tmp_path / "x.tar", "w") as shard:
        member = tarfile.TarInfo("x.png")
        member.size = len(data)
        shard.addfile(member, io.BytesIO(data))
    for place, column in (("a", "image"), ("x.tar", "png")):
        for orient, shape in ((True, (32, 64)), (False, (64, 32))):
            (batch,) = Loader(files(str(tmp_path / place), orient=orient), batch_size=1, policy="drop")
            assert np.asarray(batch[column]).shape == (1, *shape, 3)


def test_16_bits_are_turned_too_and_tiff_is_turned_once() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    wanted = np.rot90(RAMP >> 8, -1)
    for form in ("PNG", "TIFF"):
        assert (decoded(saved(Image.fromarray(RAMP), form, exif=exif))[..., 0] == wanted).all()


def test_an_image_that_is_too_large_or_damaged_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    whole = saved(Image.fromarray(np.random.default_rng(0).permuted(RAMP)), "PNG")
    for damaged in (b"", b"no image", whole[:200]):
        (tmp_path / "a" / "x.png").write_bytes(damaged)
        with pytest.raises(DataError, match=r"'image': .*a/x\.png: cannot be decoded: "):
            files(str(tmp_path))
    (tmp_path / "a" / "x.png").write_bytes(whole)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(DataError, match=r"a/x\.png: cannot be decoded: .*4096 pixels.*raise PIL\.Image\.MAX"):
        files(str(tmp_path))
