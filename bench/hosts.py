"""Time of an allreduce between three hosts and more, compared with gloo and with the rate of the network.

    python bench/hosts.py [--full] [--rounds 5] [--hosts 3 4 8]

Each host is a network namespace with one rank, joined to the others by a bridge; once without a limit, once with
1 Gbit/s in each direction of each cable. A straggler is a last rank that begins each operation 50 ms after the others:
what is measured is how soon they wake. Needs root. Prints a table and writes bench/results/*-hosts.json."""

import sys
from collections.abc import Mapping
from dataclasses import replace

import peers
import torch
from allreduce import Field, title_of
from comparison import KIB, MIB, OURS, Line, bytes_of, compare, table
from namespaces import DEVICE, bridge, inside, namespaces, problem
from peers import LAUNCHERS, BenchRank, Times
from race import Race, record, spread

from farandole.config import Config

SIZES = {0: (4, 64 * KIB, MIB, 16 * MIB), 1: (MIB, 16 * MIB)}  # by Gbit/s; 0: no limit
LATE = 0.05  # seconds
STRAGGLER = "straggler"
MOST, VOLUME = 50, 32 * MIB  # operations, and bytes, of a contender in a round
MUST = {4: 10.0, 64 * KIB: 3.0, MIB: 1.2}  # gloo's time, without a limit
RATE_MUST = 0.9  # of 1 Gbit/s; headers cost 4.5 %


def measure(bench: BenchRank) -> dict[str, Times]:
    """Measure as one rank; return the times by title and contender."""
    rounds, gbit = int(str(bench.options["rounds"])), int(str(bench.options["gbit"]))
    factor = 4 if bench.options["full"] else 1
    last = bench.rank == bench.size - 1
    results: dict[str, Times] = {}
    config = Config.from_environment(interface=bench.interface)
    with bench.context("hosts", config, hosts=True) as context, bench.gloo():
        field = Field(bench, context)
        for size in SIZES[gbit]:
            contenders = field.allreduce(size, torch.float32, adds=False)
            repeats = factor * max(3, min(MOST, VOLUME // size))
            title = title_of(size, "float32")
            results[title] = peers.take_turns(bench, contenders, rounds, repeats)
            if gbit == 0 and size <= MIB:
                waiting = {name: replace(each, late=LATE if last else 0) for name, each in contenders.items()}
                results[f"{title}, {STRAGGLER}"] = peers.take_turns(bench, waiting, rounds, factor * 10)
    return results


def between(hosts: int, gbit: int, options: Mapping[str, object]) -> tuple[dict[str, Race], list[Line]]:
    """Measure one rank on each of `hosts` hosts, with `gbit` Gbit/s between them; return the races and their lines."""
    where = f"{hosts} hosts, {gbit} Gbit/s" if gbit else f"{hosts} hosts"
    sys.stderr.write(f"{where} ...\n")
    launcher = replace(LAUNCHERS["plain"], environment={"GLOO_SOCKET_IFNAME": DEVICE})
    with namespaces(hosts) as names, bridge(names, gbit=gbit) as address:
        net = address.rpartition(".")[0]
        ranks = peers.run_ranks(
            __file__,
            hosts,
            launcher,
            {**options, "gbit": gbit},
            prefixes=[inside(name) for name in names],
            interfaces=[f"{net}.{place + 1}" for place in range(hosts)],
        )
    races = {f"{where}: {title}": race for title, race in peers.races_of(ranks).items()}
    lines: list[Line] = []
    for title, race in races.items():
        size = bytes_of(title.partition(": ")[2])
        judged = not gbit and STRAGGLER not in title and size in MUST
        lines += compare(title, race, {"gloo": MUST[size]} if judged else {})
        if gbit:
            lines.append(share_of_rate(title, size, hosts, gbit, race))
    return races, lines


def share_of_rate(title: str, size: int, hosts: int, gbit: int, race: Race) -> Line:
    """Return the line with the share of the rate: each host must send and receive 2 (N-1)/N times the buffer."""
    least = 2 * (hosts - 1) / hosts * size * 8 / (gbit * 1e9)
    ours = race.seconds[OURS]
    shares, taken = spread([least / value for value in ours]), spread([1e6 * value for value in ours])
    return Line(title, "rate", taken, spread([1e6 * least]), shares, RATE_MUST if size > MIB else None)


def main() -> None:
    parser = peers.arguments(__doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=[3, 4, 8], metavar="N", help="numbers of hosts")
    given = parser.parse_args()
    if reason := problem():
        sys.stdout.write(f"no hosts: {reason}\n")
        return
    races: dict[str, Race] = {}
    lines: list[Line] = []
    for hosts in given.hosts:
        for gbit in SIZES:
            found = between(hosts, gbit, {"full": given.full, "rounds": given.rounds})
            races |= found[0]
            lines += found[1]
    sys.stdout.write(f"{table('allreduce between hosts', lines)}\n")
    sys.stdout.write(f"{record('hosts', races, ('farandole', 'torch'), lines)}\n")


if __name__ == "__main__":
    bench = peers.bench_rank_of(sys.argv)
    if bench is None:
        main()
    else:
        bench.leave(measure(bench))
