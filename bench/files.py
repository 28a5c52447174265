"""Samples per second from image folders and tar shards.

    python bench/files.py [--images 2000] [--rounds 3] [--workers 2]

All contenders decode JPEG files of 256 x 256 pixels in ten folders with the same function, resize them to 224 x 224,
and make shuffled batches of 64. farandole.data, with threads and with processes, is compared with torch's DataLoader
and SPDL on the same folder, and with Hugging Face datasets (from an Arrow file, and streaming from Parquet), LitData
(from Parquet) and Mosaic Streaming (from its own shards), which read the same images. WebDataset and Hugging Face's
streaming read tar shards. All have as many workers. Each contender opens the data, reads one epoch, and ends; the
result is seconds per epoch. `python bench/peer_environment.py` installs the others. Writes bench/results/*-files.json.
"""

import argparse
import io
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from comparison import OURS
from image_peers import BATCH, SHARD, SIZE, Reader, folder_readers, shard_readers
from peer_environment import NAMES, enter
from PIL import Image
from race import race, record, spread

from farandole.data import Loader, Reading, files
from farandole.torch.data import TensorLoader

PROCESSES = f"{OURS}, processes"
CLASSES = 10


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


def timed(batches: Reader, count: int) -> Callable[[], float]:
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
        races = {}
        for title, folder, column, readers in (
            (f"folder of {count} images", images, "image", folder_readers(images, Path(scratch), workers)),
            (f"tar shards of {SHARD} images", shards, "jpg", shard_readers(shards, workers)),
        ):
            contenders: dict[str, Reader] = {
                OURS: lambda folder=folder, column=column: ours(folder, column, threads),
                PROCESSES: lambda folder=folder, column=column: ours(folder, column, processes),
                **readers,
            }
            races[title] = race({name: timed(each, count) for name, each in contenders.items()}, asked.rounds)
    for title, each in races.items():
        print(title)
        print(each.report())
        for name, ratios in each.ratios(PROCESSES).items():
            print(f"  {f'{name} : {PROCESSES}':<48} {spread(ratios)}")
        for name, seconds in each.seconds.items():
            print(f"  {name:<32} {count / sorted(seconds)[len(seconds) // 2]:.0f} samples/s")
    print(record("files", races, ["torch", "pillow", "pyarrow", *NAMES]))


if __name__ == "__main__":
    enter()
    main()
