"""What holds for every test."""

from collections.abc import Iterator

import pytest

from helpers.leaks import Snapshot


@pytest.fixture(autouse=True)
def leak_police(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread, a child, a connection or a changed environment behind."""
    before = Snapshot.take()
    yield
    leaks = before.leaks(shared_session=request.node.get_closest_marker("spark") is not None)
    if leaks:
        pytest.fail("the test left behind:\n  " + "\n  ".join(leaks), pytrace=False)
