"""A part of torch's own tests of torch.distributed, over farandole in place of gloo. tools/torch_suite.py runs all."""

from pathlib import Path

import pytest

pytest.importorskip("torch.distributed")

from torch_suite import Unfinished, run_tests

# A collective of each form, groups, messages with their events in the profiler, DDP, and one that torch opens for MPI.
GLOO = [
    "DistributedDataParallelCPU", "all_gather_coalesced_simple", "all_reduce_full_group_sum", "gather",
    "isend_torch_profiler", "monitored_barrier_gloo_subgroup", "send_recv_any_source", "sparse_all_reduce_sum",
]  # fmt: skip
MPI = ["all_to_all_single_unequal_split"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("opened", ["gloo", "mpi"])
def test_torchs_tests(opened: str) -> None:
    names = [f"test_{name}" for name in (MPI if opened == "mpi" else GLOO)]
    found = run_tests("farandole", 2, only=f"^({'|'.join(names)})$", opened=opened, timeout=240)
    assert sorted(found) == sorted(names)
    assert {name: each.reason for name, each in found.items() if each.state != "passed"} == {}


def test_a_run_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    kept = tmp_path / "outcomes.json"
    with pytest.raises(Unfinished, match="1 of 1 tests over gloo at 2 ranks are left"):
        run_tests("gloo", 2, only="^test_get_rank$", timeout=0, kept=kept)
    found = run_tests("gloo", 2, only="^test_get_rank$", timeout=60, kept=kept)
    assert found["test_get_rank"].state == "passed"
    assert run_tests("gloo", 2, only="^test_get_rank$", timeout=0, kept=kept) == found
