"""Pictures of benchmarks: a row for each measurement, a color for each competitor, ratios from left to right."""

from pathlib import Path
from xml.etree import ElementTree

import pictures
import pytest
from comparison import Line
from race import Race, Spread, record

SVG = "{http://www.w3.org/2000/svg}"


def line(what: str, against: str, ratio: float) -> Line:
    return Line(what, against, Spread(1, 1, 1), Spread(1, ratio, 2), Spread(ratio / 2, ratio, 2 * ratio))


LINES = [line("4 B", "gloo", 20.0), line("4 B", "MPI <4>", 0.7), line("1 MiB & more", "gloo", 3.0)]
RESULT = {
    "name": "allreduce",
    "machine": {"processor": "a processor", "cores": 2, "load": [0.25, 0, 0]},
    "python": "3.11.7",
    "packages": {"torch": "2.13.0", "mpi4py": "not installed"},
}


def test_a_picture_shows_each_ratio_at_its_place() -> None:
    root = ElementTree.fromstring(pictures.draw(RESULT, LINES))
    texts = [each.text or "" for each in root.iter(f"{SVG}text")]
    assert {"gloo", "MPI <4>", "4 B", "1 MiB & more"} <= set(texts)
    assert "a processor, 2 cores, load 0.2; Python 3.11.7, torch 2.13.0" in texts
    dots = [each for each in root.iter(f"{SVG}circle") if each.get("r") == "3.5"]
    places = [float(each.get("cx", "nan")) for each in dots]
    assert places[1] < places[2] < places[0]
    assert dots[0].get("fill") == dots[2].get("fill") != dots[1].get("fill")
    one = next(each for each in root.iter(f"{SVG}text") if each.text == "1")
    assert places[1] < float(one.get("x", "nan")) < places[2]


def test_the_page_shows_each_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import race

    monkeypatch.setattr(race, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(pictures, "FOLDER", tmp_path / "performance")
    monkeypatch.setattr(pictures, "PAGE", tmp_path / "performance.md")
    (tmp_path / "performance").mkdir()
    (tmp_path / "performance" / "earlier.svg").write_text("<svg/>")
    found = record("fusion", {"a": Race({"farandole": [1.0], "gloo": [2.0]})}, ["torch"], LINES)
    pictures.main([str(found), str(record("counts", {}, []))])
    page = (tmp_path / "performance.md").read_text()
    assert "(performance/earlier.svg)" in page
    assert "(performance/fusion.svg)" in page
    assert "counts" not in page
    ElementTree.parse(tmp_path / "performance" / "fusion.svg")
