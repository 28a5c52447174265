"""A program of JAX alone: `psum` between processes with one device each, timed.

    python jax_psum.py COORDINATOR PROCESSES

The number of the process is in RANK, or OMPI_COMM_WORLD_RANK. Process 0 prints the seconds of one `psum` by bytes."""

import json
import os
import statistics
import sys
import time
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SIZES = (4, 64 << 10, 1 << 20, 16 << 20)
CHAIN = 8  # operations of one program, each of which needs the result of the one before

processes = int(sys.argv[2])
rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
jax.distributed.initialize(sys.argv[1], processes, rank)
mesh = Mesh(np.array(jax.devices()), ("process",))


@jax.jit
@partial(jax.shard_map, mesh=mesh, in_specs=P("process"), out_specs=P("process"))
def chain(values: jax.Array) -> jax.Array:
    for _ in range(CHAIN):
        values = jax.lax.pcast(jax.lax.psum(values, "process"), "process", to="varying")
    return values


found = {}
for size in SIZES:
    values = jax.make_array_from_process_local_data(NamedSharding(mesh, P("process")), np.ones(size // 4, np.float32))
    result = chain(values)
    assert bool((np.asarray(result.addressable_shards[0].data) == processes**CHAIN).all())
    times = []
    for _ in range(200 if size <= 64 << 10 else 30 if size <= 1 << 20 else 8):
        begin = time.perf_counter()
        jax.block_until_ready(chain(values))
        times.append((time.perf_counter() - begin) / CHAIN)
    found[size] = statistics.median(times)
if rank == 0:
    sys.stdout.write(f"jax_psum: {json.dumps(found)}\n")
