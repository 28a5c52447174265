"""Rows of a converter in a folder of Parquet files, which any process reads."""

from dataclasses import dataclass
from pathlib import Path

from farandole.data import Reader, make_batch_reader
from farandole.data.stores.urls import is_local, open_url
from farandole.masking import mask
from farandole.spark.rows.dataset_converter import ReaderArguments


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """Rows in a folder of Parquet files; see `ConvertedRows`."""

    url: str
    rows: int

    def __repr__(self) -> str:
        return f"WrittenRows({mask(self.url)!r}, {self.rows})"

    def files(self) -> list[str]:
        """Return the URLs of the Parquet files."""
        fs, folder = open_url(self.url, {})
        found = sorted(file for file in fs.find(folder) if file.endswith(".parquet"))
        if is_local(self.url, None):
            return [Path(file).as_uri() for file in found]
        return [f"{self.url}{file.removeprefix(folder)}" for file in found]

    def count(self) -> int:
        """See `ConvertedRows`."""
        return self.rows

    def read(self, options: ReaderArguments) -> Reader:
        """See `ConvertedRows`."""
        return make_batch_reader(self.url, **options)

    def close(self) -> None:
        """Remove the folder, if it is there."""
        fs, path = open_url(self.url, {})
        if fs.exists(path):
            fs.rm(path, recursive=True)
