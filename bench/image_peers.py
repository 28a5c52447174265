"""Readers of images that `bench/files.py` compares with farandole.data, each set up as its documents recommend.

All decode with the function of farandole.data, also SPDL, whose own decoder needs FFmpeg and scales otherwise.
Rows are shuffled, by those that stream in a buffer of a thousand rows.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.utils.data
from parquet_peers import index_litdata
from peer_environment import missing

from farandole.data.formats.images import decode_image

SIZE, BATCH, SHARD, BUFFER = (224, 224), 64, 250, 1000

Reader = Callable[[], Iterator[int]]


class Folder(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """An image folder for torch's DataLoader."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.rglob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        path = self.paths[place]
        return image_of(path.read_bytes()), label_of(path)


def image_of(content: bytes) -> torch.Tensor:
    """Decode an image into a tensor (height, width, 3)."""
    return torch.from_numpy(decode_image(content, "image", SIZE).copy())


def label_of(path: Path) -> int:
    """Return the number in the name of an image's folder."""
    return int(path.parent.name.removeprefix("class"))


def data_loader(folder: Path, workers: int) -> Iterator[int]:
    """Yield the number of samples of each batch of torch's DataLoader."""
    loader = torch.utils.data.DataLoader(Folder(folder), batch_size=BATCH, shuffle=True, num_workers=workers)
    for pixels, _ in loader:
        yield len(pixels)


def spdl_folder(folder: Path, workers: int) -> Iterator[int]:
    """Yield the number of samples of each batch of SPDL's DataLoader."""
    from spdl.dataloader import DataLoader

    paths = random.sample(data := sorted(folder.rglob("*.jpg")), len(data))

    def load(path: Path) -> tuple[torch.Tensor, int]:
        return image_of(path.read_bytes()), label_of(path)

    def batch_of(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples])

    loader = DataLoader(paths, preprocessor=load, batch_size=BATCH, aggregator=batch_of, num_threads=workers)
    for pixels, _ in loader:
        yield len(pixels)


def litdata_stream(folder: Path, index: Path, workers: int) -> Iterator[int]:
    """Yield the number of samples of each batch of LitData, from Parquet files."""
    import litdata
    from litdata.streaming.item_loader import ParquetLoader

    data = litdata.StreamingDataset(
        str(folder), item_loader=ParquetLoader(), shuffle=True, index_path=str(index), transform=decoded_row
    )
    for batch in litdata.StreamingDataLoader(
        data, batch_size=BATCH, num_workers=workers, multiprocessing_context="forkserver"
    ):
        yield len(batch["image"])


def row_of(path: str) -> dict[str, Any]:
    """Return the content and the label of an image file."""
    return {"data": Path(path).read_bytes(), "label": label_of(Path(path))}


def decoded_row(row: dict[str, Any]) -> dict[str, Any]:
    """Decode a row of `row_of`."""
    return {"image": image_of(row["data"]), "label": row["label"]}


def table_rows(folder: Path, workers: int) -> Iterator[int]:
    """Yield the number of samples of each batch of Hugging Face datasets, from an Arrow file."""
    import datasets

    data = datasets.load_from_disk(str(folder)).with_transform(decoded_columns)
    for batch in torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers):
        yield len(batch["image"])


def table_stream(folder: Path, workers: int) -> Iterator[int]:
    """Yield the number of samples of each batch of Hugging Face datasets, streamed from Parquet."""
    import datasets

    files = sorted(map(str, folder.glob("*.parquet")))
    data = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    data = data.shuffle(seed=0, buffer_size=BUFFER).map(decoded_row, remove_columns=["data"])
    for batch in torch.utils.data.DataLoader(data, batch_size=BATCH, num_workers=workers):
        yield len(batch["image"])


def decoded_columns(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Decode rows of a table."""
    return {"image": [image_of(data) for data in rows["data"]], "label": rows["label"]}


def write_tables(images: Path, folder: Path, stream: Path) -> None:
    """Write the images as an Arrow file of Hugging Face datasets, and as Parquet files of `SHARD` rows."""
    import datasets

    rows = [row_of(str(path)) for path in sorted(images.rglob("*.jpg"))]
    table = datasets.Dataset.from_dict({name: [row[name] for row in rows] for name in ("data", "label")})
    table.save_to_disk(str(folder))
    stream.mkdir()
    for first in range(0, len(rows), SHARD):
        chosen = table.select(range(first, min(len(rows), first + SHARD)))
        chosen.to_parquet(str(stream / f"{first:06}.parquet"))


def mosaic_stream(folder: Path, workers: int) -> Iterator[int]:
    """Yield the number of samples of each batch of Mosaic Streaming."""
    import streaming

    class Images(streaming.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, place: int) -> dict[str, Any]:
            return decoded_row(super().__getitem__(place))

    streaming.base.util.clean_stale_shared_memory()
    data = Images(local=str(folder), shuffle=True, batch_size=BATCH)
    for batch in torch.utils.data.DataLoader(data, batch_size=BATCH, num_workers=workers):
        yield len(batch["image"])


def write_mosaic(images: Path, folder: Path) -> None:
    """Write the shards of Mosaic Streaming."""
    import streaming

    with streaming.MDSWriter(out=str(folder), columns={"data": "bytes", "label": "int"}) as writer:
        for path in sorted(images.rglob("*.jpg")):
            writer.write(row_of(str(path)))


def folder_readers(images: Path, scratch: Path, workers: int) -> dict[str, Reader]:
    """Write the images in the formats of the installed readers; return the readers by name."""
    found: dict[str, Reader] = {"torch DataLoader": lambda: data_loader(images, workers)}
    if not missing("spdl"):
        found["SPDL"] = lambda: spdl_folder(images, workers)
    if not missing("datasets"):
        write_tables(images, scratch / "table", scratch / "parquet")
        found["Hugging Face datasets"] = lambda: table_rows(scratch / "table", workers)
        found["Hugging Face streaming"] = lambda: table_stream(scratch / "parquet", workers)
    if "Hugging Face streaming" in found and not missing("litdata", "polars"):
        index = index_litdata(scratch / "parquet")
        found["LitData"] = lambda: litdata_stream(scratch / "parquet", index, workers)
    if not missing("streaming"):
        write_mosaic(images, scratch / "mosaic")
        found["Mosaic Streaming"] = lambda: mosaic_stream(scratch / "mosaic", workers)
    return found


def shard_readers(shards: Path, workers: int) -> dict[str, Reader]:
    """Return the installed readers of tar shards by name."""
    found: dict[str, Reader] = {}
    if not missing("webdataset"):
        found["WebDataset"] = lambda: webdataset_shards(shards, workers)
    if not missing("datasets"):
        found["Hugging Face streaming"] = lambda: streamed_shards(shards, workers)
    return found


def webdataset_shards(folder: Path, workers: int) -> Iterator[int]:
    """Yield the number of samples of each batch of WebDataset, whose shards are divided among the workers."""
    import webdataset

    urls = sorted(map(str, folder.glob("*.tar")))
    data = webdataset.WebDataset(urls, shardshuffle=len(urls)).shuffle(BUFFER).map(decoded_sample).batched(BATCH)
    for pixels, _ in webdataset.WebLoader(data, batch_size=None, num_workers=workers):
        yield len(pixels)


def decoded_sample(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Decode a sample of WebDataset into an image and its label."""
    return image_of(sample["jpg"]), int(sample["cls"])


def streamed_shards(folder: Path, workers: int) -> Iterator[int]:
    """Yield the number of samples of each batch of Hugging Face datasets, streamed from tar shards."""
    import datasets

    files = sorted(map(str, folder.glob("*.tar")))
    data = datasets.load_dataset("webdataset", data_files=files, split="train", streaming=True)
    data = data.cast_column("jpg", datasets.Image(decode=False)).shuffle(seed=0, buffer_size=BUFFER)
    data = data.map(decoded_jpg, remove_columns=["jpg", "cls", "__key__", "__url__"])
    for batch in torch.utils.data.DataLoader(data, batch_size=BATCH, num_workers=workers):
        yield len(batch["image"])


def decoded_jpg(row: dict[str, Any]) -> dict[str, Any]:
    """Decode a row of a tar shard."""
    return {"image": image_of(row["jpg"]["bytes"]), "label": int(row["cls"])}
