"""Members of tar files, compared with those that the standard library finds."""

import io
import tarfile

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

from farandole.data.sample_formats import _tar_files


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
    for length in range(1, ends[-1], 50):
        if length not in ends:
            with pytest.raises(tarfile.ReadError):
                list(_tar_files(io.BytesIO(whole[:length])))
    assert len(list(_tar_files(io.BytesIO(whole[: ends[1]])))) == 2  # archives without an end mark are in use
    header = whole[ends[1] : ends[1] + 512]
    negative = header[:124] + b"-0000001000\0" + header[136:148] + b" " * 8 + header[156:]
    negative = negative[:148] + b"%06o\0 " % sum(negative) + negative[156:]
    holes = tarfile.TarInfo("2.bin")
    holes.type = tarfile.GNUTYPE_SPARSE
    for damaged in (b"garbage" + header[7:], negative, holes.tobuf(tarfile.GNU_FORMAT)):
        with pytest.raises(tarfile.ReadError, match=r"damaged|negative|holes"):
            list(_tar_files(io.BytesIO(whole[: ends[1]] + damaged + whole[ends[1] + 512 :])))
