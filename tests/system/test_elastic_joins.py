"""Ranks that join an elastic job while the others train: what they do before, and losses at that moment."""

import os
import signal
from pathlib import Path

import pytest

from system.elastic_training import LINE, TORCH_TRAINING, TRAINING, Training, training

pytestmark = pytest.mark.native

SIZES = ("-np", "2", "--min-np", "1", "--max-np", "3")
# A newcomer expects to be one of three. It leaves its process in a file, and waits for another file.
PREPARING = """
hvd.init()
if hvd.size() == 3 and not os.path.exists("go"):
    with open("new", "w") as file:
        file.write(f"{os.getpid()} {hvd.rank()} {hvd.local_rank()} {hvd.local_size()}")
    os.rename("new", "newcomer")
    while not os.path.exists("go"):
        time.sleep(0.01)
"""
# The rank that `dies` ends once, while a newcomer takes over the state.
DYING = """
class State(elastic.ObjectState):
    def sync(self):
        if hvd.size() == 3 and {dies} and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), 9)
        super().sync()

state = train(State("""
# Member 1 ends when it has got its place, so that the others go on without it, and one comes in its place.
SETS = """
if os.environ["FARANDOLE_MEMBER"] == "1":
    from farandole.meeting.launched.elastic import ElasticRendezvous
    ElasticRendezvous.__init__ = lambda *given: os.kill(os.getpid(), 9)
sets = [hvd.ProcessSet(ranks) for ranks in ([0, 1], [1, 2], [2])]
hvd.init(process_sets=sets)
"""
CHECK_SETS = """
        assert [each.ranks for each in sets if each.process_set_id] == [
            ranks for ranks in ([0, 1], [1, 2][: hvd.size() - 1], [2][: hvd.size() - 2]) if ranks]
        for each in sets:
            if each.process_set_id and each.included():
                assert hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=each)[0] == each.size()
"""


def offer(folder: Path, slots: int) -> tuple[str, str]:
    """Let the job's hosts have so many slots; return the options by which it finds them."""
    (folder / "offered").write_text(f"echo localhost:{slots}\n")
    (folder / "offered").rename(folder / "hosts.sh")
    return "--host-discovery-script", str(folder / "hosts.sh")


def newcomer(job: Training) -> list[int]:
    """Wait for a newcomer that prepares itself; return its process and the place that it expects."""
    job.wait((job.folder / "newcomer").exists, "a newcomer prepares itself")
    found = [int(each) for each in (job.folder / "newcomer").read_text().split()]
    (job.folder / "newcomer").unlink()
    return found


@pytest.mark.parametrize("program", [TRAINING, TORCH_TRAINING], ids=["numpy", "torch"])
def test_others_train_on_while_a_newcomer_prepares_itself(tmp_path: Path, program: str) -> None:
    # Also the optimizer of the job is made before.
    where = "@elastic.run\n" if program == TORCH_TRAINING else "hvd.init()\n"
    prepared = program.replace(where, f"{PREPARING}\n{where}")
    with training(tmp_path, *SIZES, *offer(tmp_path, 2), program=prepared) as job:
        job.checks_itself = program == TORCH_TRAINING
        job.wait(lambda: 2 in job.sizes(), "two ranks train")
        offer(tmp_path, 3)
        pid, *place = newcomer(job)
        assert place == [2, 2, 3]
        since = len(job.output)
        job.wait(lambda: len(job.sizes(since)) > 20, "the others train on")
        os.kill(pid, signal.SIGKILL)
        newcomer(job)
        job.wait(lambda: len(job.sizes(since)) > 40, "the others train on")
        assert set(job.sizes()) == {2}
        for member in job.pids():
            steps = [int(found[2]) for found in LINE.finditer(job.output) if int(found[1]) == member]
            assert steps == list(range(1, len(steps) + 1)), "the loss of a newcomer disturbs nobody"
        (tmp_path / "go").touch()
        job.wait(lambda: 3 in job.sizes(), "three ranks train")
        assert len(job.finish()) == 3


@pytest.mark.parametrize("code", [0, 3], ids=["well", "crash"])
@pytest.mark.parametrize("place", ["hvd.init()", "numbers ="], ids=["before init", "after it"])
def test_a_newcomer_ends_before_it_reaches_the_training(tmp_path: Path, place: str, code: int) -> None:
    """The others train on, and another newcomer takes its slot."""
    program = TRAINING.replace(place, f'os.environ["FARANDOLE_MEMBER"] == "2" and sys.exit({code})\n{place}')
    with training(tmp_path, *SIZES, *offer(tmp_path, 2), program=program) as job:
        job.checks_itself = False
        job.wait(lambda: 2 in job.sizes(), "two ranks train")
        survivors = job.pids()
        offer(tmp_path, 3)
        job.wait(lambda: sorted(job.pids()) == [0, 1, 3], "three ranks train")
        assert set(survivors.values()) < set(job.finish())
        lost = "has left: its program ended before it reached the training" if code == 0 else "is lost: "
        assert f"member 2 {lost}" in job.report()


def test_a_newcomer_that_ends_with_the_training_is_not_reported_as_lost(tmp_path: Path) -> None:
    prepared = TRAINING.replace("hvd.init()\n", f"{PREPARING}\n")
    with training(tmp_path, *SIZES, *offer(tmp_path, 2), program=prepared) as job:
        job.wait(lambda: 2 in job.sizes(), "two ranks train")
        offer(tmp_path, 3)
        newcomer(job)
        assert len(job.finish()) == 2
        assert "is lost" not in job.report()


def test_a_newcomer_that_needs_the_others_takes_its_place_at_once(tmp_path: Path) -> None:
    program = TRAINING.replace("hvd.init()\n", "hvd.init()\nfirst = hvd.add_process_set([0])\n")
    program = program.replace(
        "        state.step += 1\n", "        state.step += 1\n        assert first.size() == 1\n"
    )
    with training(tmp_path, *SIZES, *offer(tmp_path, 2), program=program) as job:
        job.checks_itself = False
        job.wait(lambda: 2 in job.sizes(), "two ranks train")
        offer(tmp_path, 3)
        job.wait(lambda: 3 in job.sizes(), "three ranks train")
        assert len(job.finish()) == 3


@pytest.mark.parametrize("dies", ["self.step == 0", "hvd.rank() == 0"], ids=["newcomer", "holder"])
def test_a_rank_dies_while_a_newcomer_takes_over_the_state(tmp_path: Path, dies: str) -> None:
    program = TRAINING.replace("state = train(elastic.ObjectState(", DYING.format(dies=dies))
    with training(tmp_path, *SIZES, *offer(tmp_path, 2), program=program) as job:
        job.checks_itself = False
        job.wait(lambda: 2 in job.sizes(), "two ranks train")
        survivors = set(job.pids().values())
        offer(tmp_path, 3)
        job.wait((tmp_path / "died").exists, "a rank has died")
        since = len(job.output)
        job.wait(lambda: 3 in job.sizes(since), "three ranks train")
        ended = job.finish()
    assert len(ended) == 3
    assert len(survivors & set(ended)) == (2 if "step" in dies else 1)


def test_process_sets_of_ranks_that_are_lost_before_the_training_begins(tmp_path: Path) -> None:
    program = TRAINING.replace("hvd.init()\n", SETS).replace(
        "        state.step += 1\n", f"        state.step += 1{CHECK_SETS}"
    )
    with training(tmp_path, "-np", "3", "--min-np", "2", "--max-np", "3", program=program) as job:
        job.checks_itself = False
        job.wait(lambda: 2 in job.sizes(), "two ranks train")
        job.wait(lambda: 3 in job.sizes(), "three ranks train")
        assert len(job.finish()) == 3
