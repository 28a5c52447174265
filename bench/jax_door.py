"""Speed of JAX's collectives between processes on CPUs: over gloo, farandole in its place, and Open MPI.

    python bench/jax_door.py [--rounds 5]

Two processes of `programs/jax_psum.py`, which knows nothing of farandole, run `psum` of four sizes. The contenders take
turns. Prints a table of the times of one `psum`, and writes bench/results/*-jax_door.json. For Open MPI the script
builds a library for MPItrampoline, of `programs/open_mpi_wrapper.c`."""

import argparse
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from comparison import OURS, Line, compare, size_text, table
from peers import LAUNCHERS
from race import Race, record

from farandole.core.plugins import plugin_path

PROGRAM = Path(__file__).parent / "programs" / "jax_psum.py"
WRAPPER = PROGRAM.with_name("open_mpi_wrapper.c")
FUNCTIONS = Path(__file__).parents[1] / "native" / "plugins" / "mpi"
PREFIX = "jax_psum: "
PROCESSES = 2
DEADLINE = 300  # seconds of one run
GLOO, OPENMPI = "gloo", "Open MPI"
MIB = 1 << 20
MUST = 3.0  # the least ratio to gloo, at 1 MiB
VARIABLE = "JAX_CPU_COLLECTIVES_IMPLEMENTATION"


def build_wrapper(folder: Path) -> Path | None:
    """Build the library for Open MPI in `folder`; return None, with a message, where that is not possible."""
    compiler, launcher = shutil.which("cc"), shutil.which(LAUNCHERS[OPENMPI].program)
    if compiler is None or launcher is None:
        sys.stdout.write(f"{OPENMPI} is left out: there is no cc, or no {LAUNCHERS[OPENMPI].program}.\n")
        return None
    source = WRAPPER.read_text(encoding="utf-8")
    ours = (FUNCTIONS / "functions.cc").read_text(encoding="utf-8")
    forms = {
        "functions": 'void MPIABI_{0}(void) {{ absent("MPI_{0}"); }}\n',
        "constants": "long MPIABI_{0};\n",
    }
    for kind, form in forms.items():
        names = (FUNCTIONS / f"absent_{kind}.txt").read_text(encoding="utf-8").split()
        # What our library has is in the wrapper, or is absent there.
        names += [each for each in re.findall(r"MPIABI_(\w+)", ours) if each.isupper() == (kind == "constants")]
        known = re.findall(r"(?:MPIABI_|HANDLE\()(\w+)", source)
        source += "".join(form.format(name) for name in dict.fromkeys(names) if name not in known)
    (folder / "wrapper.c").write_text(source, encoding="utf-8")
    library = folder / "wrapper.so"
    linked = ["-o", library, folder / "wrapper.c", "-l:libmpi.so.40"]
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", *linked], check=True)
    return library


def run(contender: str, library: Path | None) -> Mapping[str, float]:
    """Return the seconds of one `psum` by its bytes; raises `RuntimeError` with the output of a failed run."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        command = [sys.executable, "-P", str(PROGRAM), f"127.0.0.1:{free.getsockname()[1]}", str(PROCESSES)]
    env = {**os.environ, VARIABLE: "gloo" if library is None else "mpi", "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    if library is not None:
        env["MPITRAMPOLINE_LIB"] = str(library)
    if contender == OPENMPI:
        launcher = LAUNCHERS[OPENMPI]
        commands = [[launcher.program, *launcher.arguments, "-np", str(PROCESSES), *command]]
        envs = [env]
    else:
        commands = [command] * PROCESSES
        envs = [{**env, "RANK": str(rank)} for rank in range(PROCESSES)]
    with tempfile.TemporaryFile("w+") as output:
        started = [
            subprocess.Popen(words, env=each, stdout=output, stderr=subprocess.STDOUT)
            for words, each in zip(commands, envs, strict=True)
        ]
        codes = [each.wait(DEADLINE) for each in started]
        output.seek(0)
        text = output.read()
    if any(codes):
        raise RuntimeError(f"{PROGRAM.name} over {contender} failed:\n{text[-4000:]}")
    found: Mapping[str, float] = json.loads(text.partition(PREFIX)[2].partition("\n")[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        contenders: dict[str, Path | None] = {OURS: plugin_path("mpi"), GLOO: None}
        wrapper = build_wrapper(Path(folder))
        if wrapper is not None:
            contenders[OPENMPI] = wrapper
        rounds: dict[str, list[Mapping[str, float]]] = {name: [] for name in contenders}
        for number in range(given.rounds):
            for name in random.Random(number).sample([*contenders], len(contenders)):
                rounds[name].append(run(name, contenders[name]))
    races: dict[str, Race] = {}
    lines: list[Line] = []
    for size in sorted(map(int, rounds[OURS][0])):
        title = f"psum of {size_text(size)}"
        races[title] = Race({name: [each[str(size)] for each in found] for name, found in rounds.items()})
        lines += compare(title, races[title], {GLOO: MUST} if size == MIB else {})
    sys.stdout.write(f"{table(f'psum of JAX, {PROCESSES} processes', lines)}\n")
    sys.stdout.write(f"{record('jax_door', races, ('farandole', 'jax', 'jaxlib'), lines)}\n")


if __name__ == "__main__":
    main()
