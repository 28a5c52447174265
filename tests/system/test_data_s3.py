"""Parquet in an S3 store: moto's, on this machine."""

import subprocess
import sys

import pytest

from system.launched import PATIENCE

pytest.importorskip("moto.server", reason="no S3 store to read from: pip install 'moto[server]'")

# In a process of its own: Arrow's client keeps its threads and connections until the interpreter ends.
PROGRAM = """
import logging
from collections import Counter

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
from moto.server import ThreadedMotoServer

from farandole.data import Loader, ParquetSource
from farandole.errors import SourceError

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
how = dict(access_key="a", secret_key="b", region="us-east-1")
fs = pyarrow.fs.S3FileSystem(**how, endpoint_override=f"{host}:{port}", scheme="http", allow_bucket_creation=True)
fs.create_dir("bucket")
for part in range(3):
    rows = pa.table({"row": range(part * 30, part * 30 + 30)})
    pq.write_table(rows, f"bucket/data/part-{part}.parquet", filesystem=fs, row_group_size=7)

url = f"s3://a:b@bucket/data?region=us-east-1&scheme=http&endpoint_override={host}:{port}"
source = ParquetSource(url)
seen, state = [], None
for size, steps in ((4, 2), (2, 3), (3, 99)):
    states = []
    for rank in range(size):
        loader = Loader(source, batch_size=4, policy="join", rank=rank, size=size)
        if state is not None:
            loader.load_state_dict(state)
        for step, batch in zip(range(min(steps, len(loader))), loader):
            seen += batch["row"].tolist()
        states.append(loader.state_dict())
    assert all(each == states[0] for each in states)
    state = states[0]
print(Counter(seen) == Counter(range(90)), state["epoch"])

fs.delete_file("bucket/data/part-1.parquet")
try:
    list(Loader(source, batch_size=4, policy="join"))
except SourceError as error:
    print(error)
server.stop()
"""


def test_an_epoch_from_s3_on_4_then_2_then_3_ranks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=2 * PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-2] == "True 1"
    assert lines[-1] == "bucket/data/part-1.parquet: is not there, or has vanished since it was listed"
