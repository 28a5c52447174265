"""Decoder of Flyte's tables as sources of `farandole.data`: `dataset.open(ParquetSource).all()`."""

from flytekit import FlyteContext
from flytekit.models import literals
from flytekit.models.literals import StructuredDatasetMetadata
from flytekit.types.structured.structured_dataset import (
    PARQUET,
    StructuredDatasetDecoder,
    StructuredDatasetTransformerEngine,
)

from farandole.data import ParquetSource


class SourceDecoder(StructuredDatasetDecoder):  # type: ignore[misc]  # flytekit has no types
    """Decoder of a `StructuredDataset` of Parquet files to a `ParquetSource`.

    It reads only the files' footers and copies no data; a `Loader` reads the row groups of its rank."""

    def __init__(self) -> None:
        super().__init__(ParquetSource, supported_format=PARQUET)

    def decode(
        self,
        ctx: FlyteContext,
        flyte_value: literals.StructuredDataset,
        current_task_metadata: StructuredDatasetMetadata,
    ) -> ParquetSource:
        """Open the table; raises `SourceError` for files that cannot be read."""
        return ParquetSource(flyte_value.uri)


StructuredDatasetTransformerEngine.register(SourceDecoder())
