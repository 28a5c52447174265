"""Summary of several benchmarks in one table and one file.

    python bench/summary.py RESULT.json...

Prints all comparisons that have a target, missed targets last, and writes bench/results/*-summary.json."""

import json
import sys
import time
from pathlib import Path

from comparison import Line, table
from race import RESULTS, Spread


def line_of(fields: dict[str, object]) -> Line:
    """Return the comparison that `record` wrote as `fields`."""

    def spread(name: str) -> Spread | None:
        found = fields[name]
        return Spread(**found) if isinstance(found, dict) else None

    ours, ratio, must = spread("ours"), spread("ratio"), fields["must"]
    assert ours is not None and ratio is not None
    what, against = str(fields["what"]), str(fields["against"])
    return Line(what, against, ours, spread("theirs"), ratio, None if must is None else float(str(must)))


def main(paths: list[str]) -> None:
    results = [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]
    lines = [line_of(fields) for result in results for fields in result["lines"]]
    asked = sorted((line for line in lines if line.must is not None), key=lambda line: line.verdict == "MISSED")
    if not asked:
        return
    missed = sum(line.verdict == "MISSED" for line in asked)
    title = f"all of which something is asked: {len(asked) - missed} met, {missed} missed"
    path = RESULTS / f"{time.strftime('%Y%m%d-%H%M%S')}-{results[0]['machine']['host']}-summary.json"
    path.write_text(json.dumps({"results": results}, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"== summary\n{table(title, asked)}\n{path}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
