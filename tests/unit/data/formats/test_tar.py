"""Members of tar files, compared with those that the standard library finds."""

import io
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

from farandole.data import Loader, Reading, files
from farandole.data.formats.sample_formats import _tar_files
from farandole.errors import DataError, SourceError


def write_shard(path: Path, members: dict[str, bytes], *links: tuple[str, str, bytes]) -> str:
    """Write a shard of these members, and of links: name, target and tarfile's type."""
    with tarfile.open(path, "w") as shard:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))
        for name, target, kind in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            shard.addfile(member)
    return str(path)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_of_tar_files_are_those_of_tarfile(form: int) -> None:
    written = io.BytesIO()
    names = ["a/1.txt", "b" * 90 + "/" + "c" * 90 + ".jpg", "ü/2.txt", "a/folder", "x" * 99, "3.txt"]
    with tarfile.open(fileobj=written, mode="w", format=form) as shard:
        for number, name in enumerate(names):
            member = tarfile.TarInfo(name)
            folder = name.endswith("folder")
            member.size, member.mtime = 0 if folder else 700 * number, 7 if number < 3 else 7.5
            member.type = tarfile.DIRTYPE if folder else tarfile.REGTYPE
            shard.addfile(member, io.BytesIO(bytes(member.size)))
    written.seek(0)
    with tarfile.open(fileobj=written) as whole:
        wanted = [(each.name, each.offset, each.offset_data, each.size) for each in whole if each.isfile()]
    assert len(wanted) == len(names) - 1
    written.seek(0)
    assert [(each.name, each.offset, each.offset_data, each.size) for each in _tar_files(written)] == wanted


@pytest.mark.parametrize("second", ["1.bin", "ü" * 60])  # which a plain header can hold, and which it cannot
def test_a_tar_file_that_is_cut_or_damaged_is_refused(second: str) -> None:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.PAX_FORMAT) as shard:
        for name in ("0.bin", second, "2.bin", "3.bin"):
            member = tarfile.TarInfo(name)
            member.size = 700
            shard.addfile(member, io.BytesIO(b"x" * member.size))
    whole = written.getvalue()
    members = list(_tar_files(io.BytesIO(whole)))
    assert len(members) == 4
    ends = [each.offset_data + 1024 for each in members]
    for length in [*range(1, ends[-1], 50), *ends]:
        with pytest.raises(tarfile.ReadError):
            list(_tar_files(io.BytesIO(whole[:length])))
    with pytest.raises(tarfile.ReadError, match=r"without the mark of its end.* head -c 1024 /dev/zero"):
        list(_tar_files(io.BytesIO(whole[: ends[1]])))
    assert len(list(_tar_files(io.BytesIO(whole[: ends[1]]), part=True))) == 2
    assert len(list(_tar_files(io.BytesIO(whole[: ends[1]] + bytes(512))))) == 2
    with pytest.raises(tarfile.ReadError, match="after the mark of its end; join archives with tar --concatenate"):
        list(_tar_files(io.BytesIO(whole + whole)))
    header = whole[ends[1] : ends[1] + 512]
    negative = header[:124] + b"-0000001000\0" + header[136:148] + b" " * 8 + header[156:]
    negative = negative[:148] + b"%06o\0 " % sum(negative) + negative[156:]
    holes = tarfile.TarInfo("2.bin")
    holes.type = tarfile.GNUTYPE_SPARSE
    for damaged in (b"garbage" + header[7:], negative, holes.tobuf(tarfile.GNU_FORMAT)):
        with pytest.raises(tarfile.ReadError, match=r"damaged|negative|holes"):
            list(_tar_files(io.BytesIO(whole[: ends[1]] + damaged + whole[ends[1] + 512 :])))


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE])
def test_a_member_without_data_of_its_own_is_refused(tmp_path: Path, kind: bytes) -> None:
    path = write_shard(tmp_path / "x.tar", {"1.txt": b"one"}, ("2.txt", "1.txt", kind))
    what = "neither file nor folder" if kind == tarfile.FIFOTYPE else r"a link to 1\.txt"
    with pytest.raises(SourceError, match=rf"x\.tar: .*2\.txt is {what}; write files .*--hard-dereference"):
        files(path)


def test_webdataset_s_notes_are_no_samples(tmp_path: Path) -> None:
    notes = {"__meta__": b"{}", "__meta__/a.json": b"{}", "./__info__/1.txt": b"no"}
    path = write_shard(tmp_path / "x.tar", notes | {"1.txt": b"one", "__2.txt": b"two"})
    (batch,) = Loader(files(path), batch_size=2, policy="drop", reading=Reading(shuffle=False))
    assert batch["txt"].tolist() == ["one", "two"]  # type: ignore[union-attr]


def test_a_column_that_the_first_sample_lacks_is_refused(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "x.tar", {"1.txt": b"one", "2.txt": b"two", "2.cls": b"2"})
    with pytest.raises(DataError, match=r"column 'cls': .*: 2 in .*/x\.tar has this column, but the first samples"):
        list(Loader(files(path), batch_size=2, policy="drop"))


@pytest.mark.parametrize(
    ("extension", "content", "problem"),
    [("cls", b"cat", "is not an integer"), ("txt", b"\xff", "is not UTF-8"), ("png", b"no", "cannot be decoded")],
)
def test_a_member_that_cannot_be_decoded_is_named(tmp_path: Path, extension: str, content: bytes, problem: str) -> None:
    if extension == "png":
        pytest.importorskip("PIL")
    path = write_shard(tmp_path / "x.tar", {f"1.{extension}": content})
    with pytest.raises(DataError, match=rf"column '{extension}': 1 in .*/x\.tar: {problem}"):
        files(path)
