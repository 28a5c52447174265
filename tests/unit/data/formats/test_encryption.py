"""Parquet files with encrypted columns."""

import base64
from pathlib import Path

import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe

from farandole.data import ParquetSource
from farandole.data.formats.file_systems import Files
from farandole.data.tables.data_files import DataFile, TableColumn, TableSource
from farandole.errors import SourceError


class OpenKeys(pe.KmsClient):  # type: ignore[misc]
    """A key manager that hides nothing."""

    def wrap_key(self, key: bytes, master: str) -> bytes:
        return base64.b64encode(key)

    def unwrap_key(self, wrapped: bytes, master: str) -> bytes:
        return base64.b64decode(wrapped)


def write(path: Path, columns: list[str], *, plaintext_footer: bool = True) -> None:
    """Write a file of three columns, of which some are encrypted."""
    table = pa.table({"a": [1, 2], "b": [1.0, 2.0], "c": [["x"], ["y"]]})
    keys = pe.EncryptionConfiguration(
        footer_key="f", column_keys={"k": columns}, plaintext_footer=plaintext_footer, encryption_algorithm="AES_GCM_V1"
    )
    made = pe.CryptoFactory(lambda _: OpenKeys()).file_encryption_properties(pe.KmsConnectionConfig(), keys)
    with pq.ParquetWriter(path, table.schema, encryption_properties=made) as writer:
        writer.write_table(table)


def test_encrypted_columns_are_named_before_arrow_ends_the_process(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write(path, ["b", "c.list.element"])
    with pytest.raises(SourceError, match=r"rows.parquet: columns b, c are encrypted"):
        ParquetSource(str(path))
    files = Files()
    column = TableColumn(field=pa.field("a", pa.int64()), names=("a",))
    table = TableSource(files, [DataFile(files.look([str(path)])[0], 2, {})], [column], "")
    with pytest.raises(SourceError, match=r"rows.parquet: columns b, c are encrypted"):
        table.read(table.row_groups[0], ["a"])


def test_an_encrypted_footer_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "rows.parquet", ["b"], plaintext_footer=False)
    with pytest.raises(SourceError, match=r"rows.parquet: cannot be read: .*encrypted"):
        ParquetSource(str(tmp_path))
