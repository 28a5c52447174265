"""Logs of Delta tables, made by hand: deltalake writes neither column mapping nor deletion vectors."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote


def write_log(folder: Path, schema: list[Mapping[str, Any]], adds: list[Mapping[str, Any]], **options: Any) -> None:
    """Write version 0 of a table with these fields and files; `options` are features, partitions and configuration."""
    (folder / "_delta_log").mkdir(parents=True, exist_ok=True)
    features = options.pop("features", [])
    fields = [{"nullable": True, "metadata": {}} | dict(each) for each in schema]
    actions: list[Mapping[str, Any]] = [
        {
            "protocol": {
                "minReaderVersion": 3,
                "minWriterVersion": 7,
                "readerFeatures": features,
                "writerFeatures": features,
            }
        },
        {
            "metaData": {
                "id": "5a1c1d36-0000-4000-8000-000000000000",
                "format": {"provider": "parquet", "options": {}},
                "schemaString": json.dumps({"type": "struct", "fields": fields}),
                "partitionColumns": options.pop("partitions", []),
                "configuration": options.pop("configuration", {}),
                "createdTime": 1,
            }
        },
    ]
    for add in adds:
        size = (folder / unquote(add["path"])).stat().st_size
        actions.append(
            {"add": {"partitionValues": {}, "size": size, "modificationTime": 1, "dataChange": True} | dict(add)}
        )
    (folder / "_delta_log" / f"{0:020}.json").write_text("\n".join(map(json.dumps, actions)))


def mapped(name: str, physical: str, kind: object, number: int) -> dict[str, Any]:
    """Return a field that files have under another name."""
    ids = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": physical}
    return {"name": name, "type": kind, "metadata": ids}


MAPPING = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "9"}


def deletion_vector(rows: list[int]) -> dict[str, Any]:
    """Make an inline deletion vector: a 64-bit roaring bitmap of one container, in base 85."""
    container = struct.pack("<IIHHI", 12346, 1, 0, len(rows) - 1, 16) + struct.pack(f"<{len(rows)}H", *rows)
    raw = struct.pack("<IQI", 1681511377, 1, 0) + container
    raw += b"\0" * (-len(raw) % 4)
    alphabet = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    text = ""
    for at in range(0, len(raw), 4):
        value, digits = int.from_bytes(raw[at : at + 4]), ""
        for _ in range(5):
            value, digit = divmod(value, 85)
            digits = alphabet[digit] + digits
        text += digits
    return {"storageType": "i", "pathOrInlineDv": text, "sizeInBytes": len(raw), "cardinality": len(rows)}
