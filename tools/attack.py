"""Attack a job on this machine and print a table of the results.

    python tools/attack.py [--strangers N] [--rounds N] [--only NAME...] [--json FILE]

The tool attacks only sockets that it has opened itself, at addresses of this machine, with at most 2000 strangers
(connections without the job's secret). An attack takes a minute at most. Attacks between hosts need root, for network
namespaces. The exit status is 1 if an attack caused a fault.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "bench")]

from helpers.attacks import ATTACKS, Finding  # noqa: E402  needs the path above

COLUMNS = ("attack", "strangers", "rounds", "alone s", "attacked s", "added s", "faults")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the attacks and print the table; return 1 if an attack caused a fault, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strangers", type=int, default=500, help="at each socket")
    parser.add_argument("--rounds", type=int, default=5, help="of each attack, without and with strangers in turns")
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), default=list(ATTACKS), help="attacks to run")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args(arguments)
    findings = []
    for name in given.only:
        findings.append(ATTACKS[name](min(given.strangers, 2000), given.rounds))
        print(table(findings[-1:], head=name == given.only[0]), flush=True)
    if given.json:
        figures = [{**dataclasses.asdict(each), "added": each.added} for each in findings]
        machine = {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()}
        given.json.write_text(json.dumps({**machine, "attacks": figures}, indent=1) + "\n", encoding="utf-8")
    return int(any(each.faults for each in findings))


def table(findings: Sequence[Finding], *, head: bool = True) -> str:
    """Return the findings as rows of text, below the column titles if `head`."""
    rows: list[tuple[str, ...]] = [COLUMNS] if head else []
    for each in findings:
        if each.skipped:
            rows.append((each.attack, f"not tried: {each.skipped}"))
            continue
        seconds = (f"{each.alone:.3f}", f"{each.attacked:.3f}", f"{each.added:.3f}")
        rows.append((each.attack, str(each.strangers), str(each.rounds), *seconds, str(each.faults)))
    return "\n".join(f"{row[0]:26}" + "".join(f"{cell:>11}" for cell in row[1:]) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
