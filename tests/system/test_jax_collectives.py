"""Programs of jax.distributed on CPUs over farandole, in new interpreters, because `import jax` decides."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.core.plugins import plugin_path
from system.launched import farandole

pytest.importorskip("jax")

# Each process imports JAX, and compiles programs.
pytestmark = pytest.mark.timeout(300)

START = """
import os, signal, sys
import jax, numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

address, size, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.distributed.initialize(address, size, rank)
spec = P("ranks")
ring = [(each, (each + 1) % size) for each in range(size)]

def run(body, mesh, local):
    given = jax.make_array_from_process_local_data(NamedSharding(mesh, spec), local)
    made = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(given)
    return jax.tree.map(lambda each: np.asarray(each.addressable_shards[0].data), made)

"""

EVERYTHING = """
def operations(values):
    made = {
        "psum": lax.psum(values, "ranks"),
        "all_gather": lax.all_gather(values, "ranks", tiled=True),
        "ppermute": lax.ppermute(values, "ranks", ring),
        "all_to_all": lax.all_to_all(values, "ranks", 0, 0, tiled=True),
    }
    if values.dtype != bool:
        made["psum_scatter"] = lax.psum_scatter(values, "ranks", tiled=True)
    if values.dtype not in (bool, np.complex64):
        made |= {"pmax": lax.pmax(values, "ranks"), "pmin": lax.pmin(values, "ranks")}
    return made

def check(order):
    mesh, place = Mesh(np.array(jax.devices())[order], ("ranks",)), order.index(rank)
    for dtype in map(jax.numpy.dtype, ("float32", "int8", "uint32", "bool", "bfloat16", "complex64")):
        parts = np.stack([np.arange(2 * size) + 10 * each for each in order]).astype(dtype)
        total, mine = parts.sum(0, dtype=int if dtype == bool else dtype), slice(2 * place, 2 * place + 2)
        expected = {
            "psum": total, "psum_scatter": total[mine], "all_gather": parts.ravel(), "ppermute": parts[place - 1],
            "all_to_all": parts[:, mine].ravel(), "pmax": parts[:, :].real.max(0), "pmin": parts.real.min(0),
        }
        for name, got in run(operations, mesh, parts[place]).items():
            np.testing.assert_array_equal(got, expected[name], f"{name} of {dtype}")

check([0, 1, 2])
check([2, 0, 1])  # communicators have an order of their own
pairs = Mesh(np.array(jax.devices()), ("ranks",))
summed = run(lambda each: lax.psum(each, "ranks", axis_index_groups=[[0, 2], [1]]), pairs, np.float32([10**rank]))
assert summed == (10 if rank == 1 else 101), summed
print("equal", flush=True)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    run(lambda each: lax.psum(each, "ranks"), pairs, np.ones(1, np.float32))
except jax.errors.JaxRuntimeError as error:
    print(error, flush=True)
os._exit(0)  # else JAX waits for the dead process
"""


def outcomes(program: str, size: int) -> list[tuple[int, str, str]]:
    """Run the program in `size` processes; return the exit code, the output and the errors of each."""
    env = {
        **os.environ,
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "mpi",
        "JAX_PLATFORMS": "cpu",
        "MPITRAMPOLINE_LIB": str(plugin_path("mpi")),
    }
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", START + program, address, str(size), str(rank)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [each.communicate(timeout=200) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    return [(each.returncode, *output) for each, output in zip(ranks, outputs, strict=True)]


def test_every_collective_and_the_loss_of_a_process() -> None:
    done = outcomes(EVERYTHING, 3)
    assert [code for code, _, _ in done] == [0, -9, 0], done
    for rank, (_, output, errors) in enumerate(done):
        assert output.startswith("equal\n"), (output, errors)
        assert ("rank 1 is lost (its process was killed or crashed)" in output) == (rank != 1), output
        assert errors.count("JAX's collectives on CPUs are farandole's") == (rank == 0), errors


FAILURE = """
mesh = Mesh(np.array(jax.devices()), ("ranks",))
add = lambda: run(lambda each: lax.psum(each, "ranks"), mesh, np.ones(1, np.float32))
add()
if rank == 1:
    raise LookupError("no such thing")
add()
"""


@pytest.mark.slow
def test_a_process_that_ends_by_an_exception() -> None:
    (code, _, errors), (other, _, problem) = outcomes(FAILURE, 2)
    assert (code, other) == (1, 1), (errors, problem)
    assert "JaxRuntimeError" in errors and "LookupError: no such thing" in problem, (errors, problem)


JOB = """
import time
import jax, numpy as np
import farandole.jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
jax.distributed.initialize()
ranks = Mesh(np.array(jax.devices()), ("ranks",))
values = jax.make_array_from_process_local_data(NamedSharding(ranks, P("ranks")), np.ones(2, np.float32))
step = jax.jit(lambda values: values + values.sum(), out_shardings=NamedSharding(ranks, P("ranks")))
for _ in range(4):
    values = step(values)
if jax.process_index() == 0:  # the other process reads no result, and ends first
    time.sleep(1)
    print(f"{jax.process_count()} {values.addressable_shards[0].data}\\n", end="", flush=True)
"""


@pytest.mark.slow
def test_below_the_launcher_with_a_process_that_ends_first(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(JOB)
    command = ["run", "-np", "2", "--as-gloo", sys.executable, str(tmp_path / "train.py")]
    done = farandole(*command, env={"JAX_PLATFORMS": "cpu"}, timeout=150)
    assert done.returncode == 0, done.stderr
    assert " 2 [625. 625.]\n" in done.stdout, done.stdout
    assert done.stderr.count("JAX's collectives on CPUs are farandole's") == 1, done.stderr
