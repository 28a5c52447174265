"""Compressed text, JSON lines and tar shards."""

import bz2
import gzip
import io
import lzma
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import fsspec
import pyarrow as pa

from farandole.data import Loader, Reading, files
from farandole.errors import SourceError

PACKERS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}
COUNT = 3000  # lines of several blocks


def plain(suffix: str) -> bytes:
    if suffix == ".txt":
        return "\n".join(map(str, range(COUNT))).encode("utf-8-sig")
    if suffix == ".jsonl":
        return b"".join(b'{"text": "%d"}\n' % number for number in range(COUNT))
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as shard:
        for number in range(COUNT):
            member = tarfile.TarInfo(f"{number}.text")
            member.size = len(str(number))
            shard.addfile(member, io.BytesIO(str(number).encode()))
    return written.getvalue()


@pytest.mark.parametrize("end", PACKERS)
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".tar"])
def test_samples_of_compressed_files_are_those_of_plain_ones(tmp_path: Path, suffix: str, end: str) -> None:
    packed = PACKERS[end](plain(suffix))
    (tmp_path / f"x{suffix}{end.upper()}").write_bytes(packed)
    source = files(str(tmp_path))
    assert [group.rows for group in source.row_groups] == [COUNT]
    found = [text for batch in Loader(source, batch_size=700, policy="join") for text in batch["text"]]
    assert sorted(map(int, found)) == list(range(COUNT))


def test_a_tgz_is_read_and_other_names_with_a_format(tmp_path: Path) -> None:
    (tmp_path / "x.tgz").write_bytes(gzip.compress(plain(".tar")))
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"one\n") + gzip.compress(b"two\n"))
    assert files(str(tmp_path / "x.tgz")).row_groups[0].rows == COUNT
    (batch,) = Loader(
        files(str(tmp_path / "x.gz"), format="text"), batch_size=2, policy="drop", reading=Reading(shuffle=False)
    )
    assert batch["text"].tolist() == ["one", "two"]  # type: ignore[union-attr]
    whole = files(str(tmp_path / "x.gz"), format="bytes")
    (batch,) = Loader(whole, columns=["data"], batch_size=1, policy="drop")
    assert batch["data"][0][:2] == b"\x1f\x8b"  # type: ignore[index]


def test_compressed_files_of_a_store_are_read() -> None:
    with fsspec.open("memory://packed/x.jsonl.gz", "wb") as written:
        written.write(gzip.compress(plain(".jsonl")))
    assert sum(batch.rows for batch in Loader(files("memory://packed"), batch_size=700, policy="join")) == COUNT


@pytest.mark.parametrize("end", PACKERS)
def test_a_compressed_file_that_is_cut_damaged_or_too_large_is_refused(
    tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"x.txt{end}"
    packed = PACKERS[end](plain(".txt"))
    for broken in (packed[:-5], packed[: len(packed) // 2], b"plain text", b""):
        path.write_bytes(broken)
        with pytest.raises(SourceError, match=rf"^[^:]*x\.txt\{end}: (cannot be unpacked: |is empty)"):
            files(str(tmp_path))
    path.write_bytes(packed)
    monkeypatch.setattr("farandole.data.formats.compression.MOST_BYTES", 1000)
    with pytest.raises(SourceError, match=rf"^[^:]*x\.txt\{end}: holds more than 1000 bytes.*; split or unpack it"):
        files(str(tmp_path))
