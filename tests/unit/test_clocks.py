"""Clocks: all limits count by the monotonic one, so that a jump of a host's clock changes no wait."""

import re
from pathlib import Path

import farandole

SOURCES = Path(farandole.__file__).parent
NATIVE = SOURCES.parent.parent / "native"
WALL_CLOCK = re.compile(
    r"\btime\.time(_ns)?\(|\bdatetime\.(now|utcnow)\(|\bsystem_clock\b|\bCLOCK_REALTIME\b|\bgettimeofday\b"
)
READERS = {
    "compat/output.py": "times of lines, for people",
    "event_file.py": "times of curves, for people",
    "data/formats/cache.py": "the age of files that an earlier job has left",
    "data/stores/s3_requests.py": "times in signatures, which the store compares with its own clock",
    "integrations/mlflow.py": "times of points of curves, for people",
    "launch/doctor/pairs.py": "differences between the clocks of hosts",
    "launch/output.py": "times of lines, for people",
    "estimators/estimator.py": "the name of a run",
    "estimators/run_lock.py": "the start of a run, for people",
    "estimators/whole_files.py": "the age of files that a killed writer has left",
    "estimators/trainers/model_fn/job.py": "names of event files",
}


def test_only_times_for_people_and_of_files_are_of_the_wall_clock() -> None:
    files = [*SOURCES.rglob("*.py"), *NATIVE.rglob("*.cc"), *NATIVE.rglob("*.h")]
    assert len(files) > 200
    found = {str(each.relative_to(SOURCES)) for each in files if WALL_CLOCK.search(each.read_text(encoding="utf-8"))}
    assert found == set(READERS)
