"""Samples per second from image folders and tar shards.

    python bench/files.py [--images 2000] [--rounds 3] [--workers 2]

All contenders decode JPEG files of 256 x 256 pixels in ten folders with the same function, resize them to 224 x 224,
and make shuffled batches of 64. farandole.data, with threads and with processes, is compared with torch's DataLoader
with as many worker processes on the same folder. If installed (pip install webdataset datasets mosaicml-streaming),
these read the same images: WebDataset from tar shards, Hugging Face datasets from an Arrow file, Mosaic Streaming from
its own shards, all written before. Each contender opens the data, reads one epoch, and ends; the result is seconds per
epoch. Writes bench/results/*-files.json.
"""

import argparse
import io
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data
from comparison import OURS
from PIL import Image
from race import race, record, spread

from farandole.data import Loader, Reading, files
from farandole.data.formats.images import decode_image
from farandole.torch.data import TensorLoader

try:
    import webdataset
except ImportError:
    webdataset = None

try:
    import datasets
except ImportError:
    datasets = None
try:
    import streaming
except ImportError:
    streaming = None

PROCESSES = f"{OURS}, processes"
SIZE, BATCH, CLASSES, SHARD = (224, 224), 64, 10, 250


class Folder(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """An image folder for torch's DataLoader."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.rglob("*.jpg"))
        self.classes = sorted({path.parent.name for path in self.paths})

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        path = self.paths[place]
        image = decode_image(path.read_bytes(), "image", SIZE)
        return torch.from_numpy(image.copy()), self.classes.index(path.parent.name)


def write(images: Path, shards: Path, count: int) -> None:
    """Write smooth images, which JPEG compresses about as well as photographs, to a folder and to shards."""
    random = np.random.default_rng(0)
    shards.mkdir()
    for first in range(0, count, SHARD):
        with tarfile.open(shards / f"{first:06}.tar", "w") as shard:
            for number in range(first, min(count, first + SHARD)):
                pixels = Image.fromarray(random.integers(0, 255, (32, 32, 3), np.uint8)).resize((256, 256))
                written = io.BytesIO()
                pixels.save(written, "jpeg", quality=90)
                path = images / f"class{number % CLASSES}" / f"{number:06}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(written.getvalue())
                for extension, content in (("jpg", written.getvalue()), ("cls", b"%d" % (number % CLASSES))):
                    member = tarfile.TarInfo(f"{number:06}.{extension}")
                    member.size = len(content)
                    shard.addfile(member, io.BytesIO(content))


def ours(folder: Path, column: str, reading: Reading) -> Iterator[int]:
    """Yield the number of samples of each batch of farandole's."""
    loader = Loader(files(str(folder), size=SIZE), batch_size=BATCH, policy="join", reading=reading)
    for batch in TensorLoader(loader) if column == "image" else loader:
        yield len(batch[column])


def theirs(folder: Path, workers: int) -> Iterator[int]:
    """Yield the number of samples of each batch of torch's DataLoader."""
    loader = torch.utils.data.DataLoader(Folder(folder), batch_size=BATCH, shuffle=True, num_workers=workers)
    for pixels, _ in loader:
        yield len(pixels)


def decode_pair(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Decode a sample of WebDataset into an image and its label."""
    return torch.from_numpy(decode_image(sample["jpg"], "jpg", SIZE).copy()), int(sample["cls"])


def their_shards(folder: Path, workers: int) -> Iterator[int]:
    """Yield the number of samples of each batch of WebDataset, whose shards are divided among the workers."""
    urls = sorted(map(str, folder.glob("*.tar")))
    data = webdataset.WebDataset(urls, shardshuffle=len(urls)).shuffle(1000).map(decode_pair).batched(BATCH)
    for pixels, _ in webdataset.WebLoader(data, batch_size=None, num_workers=workers):
        yield len(pixels)


def decode_columns(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Decode rows of Hugging Face datasets."""
    images = [torch.from_numpy(decode_image(data, "data", SIZE).copy()) for data in rows["data"]]
    return {"image": images, "label": rows["label"]}


def their_table(folder: Path, workers: int) -> Iterator[int]:
    """Yield the number of samples of each batch of Hugging Face datasets."""
    data = datasets.load_from_disk(str(folder)).with_transform(decode_columns)
    for batch in torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers):
        yield len(batch["image"])


def their_stream(folder: Path, workers: int) -> Iterator[int]:
    """Yield the number of samples of each batch of Mosaic Streaming."""

    class Images(streaming.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
            sample = super().__getitem__(place)
            return torch.from_numpy(decode_image(sample["data"], "data", SIZE).copy()), sample["label"]

    streaming.base.util.clean_stale_shared_memory()
    data = Images(local=str(folder), shuffle=True, batch_size=BATCH)
    for pixels, _ in torch.utils.data.DataLoader(data, batch_size=BATCH, num_workers=workers):
        yield len(pixels)


def peers_of(images: Path, scratch: Path, workers: int, count: int) -> dict[str, Callable[[], float]]:
    """Write the images in the formats of the installed peers; return the peers' measurements by name."""
    found = {}
    rows = [{"data": path.read_bytes(), "label": int(path.parent.name[5:])} for path in sorted(images.rglob("*.jpg"))]
    if datasets is not None:
        table, names = scratch / "table", ("data", "label")
        datasets.Dataset.from_dict({name: [row[name] for row in rows] for name in names}).save_to_disk(str(table))
        found["Hugging Face datasets"] = timed(lambda: their_table(table, workers), count)
    if streaming is not None:
        stream = scratch / "stream"
        with streaming.MDSWriter(out=str(stream), columns={"data": "bytes", "label": "int"}) as writer:
            for row in rows:
                writer.write(row)
        found["Mosaic Streaming"] = timed(lambda: their_stream(stream, workers), count)
    return found


def timed(batches: Callable[[], Iterable[int]], count: int) -> Callable[[], float]:
    """Return a function that reads an epoch and returns its seconds."""

    def measure() -> float:
        began = time.perf_counter()
        assert sum(batches()) == count, "samples were lost"
        return time.perf_counter() - began

    return measure


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    count, workers = asked.images, asked.workers
    threads, processes = Reading(workers=workers), Reading(workers=workers, processes=True)
    with tempfile.TemporaryDirectory() as scratch:
        images, shards = Path(scratch) / "images", Path(scratch) / "shards"
        write(images, shards, count)
        races = {
            f"folder of {count} images": race(
                {
                    OURS: timed(lambda: ours(images, "image", threads), count),
                    PROCESSES: timed(lambda: ours(images, "image", processes), count),
                    "torch DataLoader": timed(lambda: theirs(images, workers), count),
                    **peers_of(images, Path(scratch), workers, count),
                },
                asked.rounds,
            )
        }
        contenders = {
            OURS: timed(lambda: ours(shards, "jpg", threads), count),
            PROCESSES: timed(lambda: ours(shards, "jpg", processes), count),
        }
        if webdataset is None:
            print("WebDataset is not installed and left out")
        else:
            contenders["WebDataset"] = timed(lambda: their_shards(shards, workers), count)
        races[f"tar shards of {SHARD} images"] = race(contenders, asked.rounds)
    for title, each in races.items():
        print(title)
        print(each.report())
        for name, ratios in each.ratios(PROCESSES).items():
            print(f"  {f'{name} : {PROCESSES}':<48} {spread(ratios)}")
        for name, seconds in each.seconds.items():
            print(f"  {name:<32} {count / sorted(seconds)[len(seconds) // 2]:.0f} samples/s")
    print(record("files", races, ["torch", "pillow", "webdataset", "datasets", "mosaicml-streaming", "pyarrow"]))


if __name__ == "__main__":
    main()
