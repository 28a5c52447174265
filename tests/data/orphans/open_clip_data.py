"""Write four tar shards of four pictures with captions, as open_clip reads them."""

import io
import tarfile

import numpy as np
from PIL import Image

generator = np.random.default_rng(0)
for shard in range(4):
    with tarfile.open(f"shard-{shard}.tar", "w") as archive:
        for number in range(4 * shard, 4 * shard + 4):
            picture = io.BytesIO()
            Image.fromarray(generator.integers(0, 256, (64, 64, 3), np.uint8)).save(picture, "JPEG")
            for name, data in ((f"{number}.jpg", picture.getvalue()), (f"{number}.txt", f"picture {number}".encode())):
                facts = tarfile.TarInfo(name)
                facts.size = len(data)
                archive.addfile(facts, io.BytesIO(data))
