"""Diagnosis of machines and their network, as a table and as JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self

from farandole.launch.doctor.facts import Fact
from farandole.launch.doctor.pairs import Link, Report

LARGEST_CLOCK = 1.0  # seconds between the clocks of two hosts
SAME = (("farandole", "version"), ("frameworks", "PyTorch"), ("frameworks", "TensorFlow"), ("frameworks", "JAX"))


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Facts of each host, links between hosts, numbered as in `hosts`, and the hosts that cannot be used."""

    hosts: Mapping[str, Sequence[Fact]]
    unusable: Mapping[str, str]
    links: Sequence[Link]

    @classmethod
    def of(cls, hosts: Sequence[str], unusable: Mapping[str, str], reports: Sequence[Report]) -> Self:
        """Join the reports of `hosts`, in their order."""
        facts = {host: report.facts for host, report in zip(hosts, reports, strict=True)}
        return cls(facts, unusable, sorted((link for each in reports for link in each.links), key=_ends))

    def problems(self) -> list[str]:
        """Return a sentence for each problem."""
        found = [f"{host} cannot be used: {reason}" for host, reason in self.unusable.items()]
        for host, facts in self.hosts.items():
            found += [f"{host}: {each.name}: {each.problem}" for each in facts if each.problem]
        names = list(self.hosts)
        for link in self.links:
            pair = f"{names[link.here]} and {names[link.there]}"
            if link.problem:
                found.append(f"{pair}: {link.problem}")
            elif abs(link.clock) > LARGEST_CLOCK:
                found.append(f"{pair}: their clocks differ by {abs(link.clock):.1f} s; let both follow a time server")
        return found + list(self._differences())

    def _differences(self) -> Iterator[str]:
        for topic, name in SAME:
            values = {
                host: each.value
                for host, facts in self.hosts.items()
                for each in facts
                if (each.topic, each.name) == (topic, name)
            }
            if len(set(values.values())) > 1:
                listed = ", ".join(f"{host}: {value}" for host, value in values.items())
                yield f"{topic} {name} differs between hosts ({listed}); install the same"

    def as_json(self) -> str:
        """Return the diagnosis as JSON: SI units, hosts by their names."""
        names = list(self.hosts)
        links = [{**asdict(link), "here": names[link.here], "there": names[link.there]} for link in self.links]
        hosts = {host: [asdict(each) for each in facts] for host, facts in self.hosts.items()}
        whole = {"hosts": hosts, "unusable": dict(self.unusable), "links": links, "problems": self.problems()}
        return json.dumps(whole, indent=2) + "\n"

    def as_text(self) -> str:
        """Return the diagnosis as tables, problems last."""
        lines: list[str] = []
        for host, facts in self.hosts.items():
            lines += [host, *_of_host(facts), ""]
        if self.links:
            lines += ["network", *_of_links(list(self.hosts), self.links), ""]
        problems = self.problems()
        lines += ["problems", *(f"  {each}" for each in problems)] if problems else ["no problems"]
        return "\n".join(lines) + "\n"


def _ends(link: Link) -> tuple[int, int]:
    return link.there, link.here


def _of_host(facts: Sequence[Fact]) -> Iterator[str]:
    width = max(len(each.name) for each in facts)
    topic = ""
    for each in facts:
        if each.topic != topic:
            topic = each.topic
            yield f"  {topic}"
        mark = "!" if each.problem else " "
        yield f"  {mark} {each.name:{width}}  {each.value or each.problem}"


def _of_links(names: Sequence[str], links: Sequence[Link]) -> Iterator[str]:
    head = ("between", "and", "round trip", "clock ahead", "MB/s there", "MB/s back")
    rows = [head, *(_row(names, link) for link in links if not link.problem)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows if len(rows) > 1 else ():
        yield "    " + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
    for link in links:
        if link.problem:
            yield f"  ! {names[link.here]} and {names[link.there]}: {link.problem}"


def _row(names: Sequence[str], link: Link) -> tuple[str, ...]:
    return (
        names[link.here],
        names[link.there],
        f"{link.latency * 1e6:.0f} us",
        f"{link.clock * 1e3:.1f} ms",
        f"{link.out / 1e6:.0f}",
        f"{link.back / 1e6:.0f}",
    )
