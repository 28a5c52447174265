"""The table of attacks, made small: it runs, and no attack causes a fault."""

import json
from pathlib import Path

import pytest
from attack import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_small_table_without_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    assert main(["--strangers", "60", "--rounds", "1", "--json", str(figures)]) == 0
    attacks = {each["attack"]: each for each in json.loads(figures.read_text())["attacks"]}
    assert {"ranks, one host", "rendezvous", "Spark's keeper of rows", "kill -9 in init, 3 ranks"} <= attacks.keys()
    assert all(each["faults"] == 0 for each in attacks.values())
    assert attacks["kill -9 in init, 3 ranks"]["attacked"] < 10.0  # of the 20 s that they would wait
    assert "added s" in capsys.readouterr().out
