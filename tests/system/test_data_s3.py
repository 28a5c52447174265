"""Parquet in an S3 store: moto's, on this machine."""

import subprocess
import sys

import pytest

from helpers.installed import require
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


# A Delta and an Iceberg table; options in the URL, as pandas takes them, and those of a catalog.
TABLES = """
import logging

import pyarrow as pa
import pyarrow.fs
from deltalake import DeltaTable, write_deltalake
from moto.server import ThreadedMotoServer
from pyiceberg.catalog.memory import InMemoryCatalog

from farandole.data import IcebergSource, Loader, ParquetSource

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
place = "{}:{}".format(*server.get_host_and_port())
how = dict(access_key="a", secret_key="b", region="us-east-1")
pyarrow.fs.S3FileSystem(**how, endpoint_override=place, scheme="http", allow_bucket_creation=True).create_dir("bucket")
query = f"region=us-east-1&scheme=http&endpoint_override={place}"
options = {"key": "a", "secret": "b", "client_kwargs": {"endpoint_url": f"http://{place}", "region_name": "us-east-1"}}

def rows(first):
    return pa.table({"row": range(first, first + 20), "part": [f"a b{n % 2}" for n in range(20)]})

def read(source):
    batches = list(Loader(source, batch_size=4, policy="join"))
    return sorted(pair for batch in batches for pair in zip(batch["row"].tolist(), batch["part"].tolist()))

def wanted(kept):
    return [(n, f"a b{n % 2}") for n in range(40) if kept(n)]

log = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
log |= {"AWS_ENDPOINT_URL": f"http://{place}", "AWS_ALLOW_HTTP": "true"}
for first in (0, 20):
    write_deltalake("s3://bucket/de lta", rows(first), mode="append", storage_options=log, partition_by=["part"])
DeltaTable("s3://bucket/de lta", storage_options=log).delete("row % 3 = 0")
for source in (ParquetSource(f"s3://a:b@bucket/de%20lta?{query}"), ParquetSource("s3://bucket/de lta", options)):
    print(source.version, read(source) == wanted(lambda row: row % 3))

settings = {"s3.access-key-id": "a", "s3.secret-access-key": "b", "s3.region": "us-east-1"}
catalog = InMemoryCatalog("x", warehouse="s3://bucket/ware", **settings, **{"s3.endpoint": f"http://{place}"})
catalog.create_namespace("db")
table = catalog.create_table("db.t", rows(0).schema)
for first in (0, 20):
    table.append(rows(first))
table.delete("row < 5")
url = f"s3://a:b@bucket/ware/db/t?{query}"
for source in (IcebergSource(table), ParquetSource(url), ParquetSource("s3://bucket/ware/db/t", options)):
    print(source.version == table.current_snapshot().snapshot_id, read(source) == wanted(lambda row: row >= 5))
server.stop()
"""


@pytest.mark.slow
def test_tables_in_s3() -> None:
    require("deltalake", "pyiceberg", "sqlalchemy")
    done = subprocess.run(
        [sys.executable, "-c", TABLES], capture_output=True, text=True, timeout=2 * PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-5:] == ["2 True"] * 2 + ["True True"] * 3
