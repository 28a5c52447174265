"""Arrow tables as pandas frames."""

import json
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    import pandas as pd


def frame_of(table: pa.Table) -> "pd.DataFrame":
    """Return the table as a frame with the index and the types that pandas has noted in it.

    pandas notes types such as `list<item: int32>[pyarrow]` that it cannot read again; such columns get the frame's
    usual types, arrays in place of lists for example."""
    noted = table.schema.pandas_metadata
    if noted is not None:
        for column in noted["columns"]:
            if not _is_readable(column["numpy_type"]):
                column["numpy_type"] = "object"
        table = table.replace_schema_metadata({**table.schema.metadata, b"pandas": json.dumps(noted)})
    frame: pd.DataFrame = table.to_pandas()
    return frame


def _is_readable(dtype: str) -> bool:
    import pandas as pd  # loads slowly, and only this needs it

    try:
        pd.api.types.pandas_dtype(dtype)
    except (TypeError, ValueError, NotImplementedError):
        return False
    return True
