"""Decisions of an elastic job's launcher, under any sequence of events."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.launch.backend import Host
from farandole.launch.elastic.roster import Action, End, Form, Limits, Outcome, Roster, Start, Tell
from farandole.launch.failures import Failure

LIMITS = Limits(least=2, most=4, wanted=3, start=30.0, patience=60.0, resets=None, cooldown=(1.0, 300.0))


class World:
    """Members that a roster has started, and what it has asked of them."""

    def __init__(self, limits: Limits = LIMITS, **slots: int) -> None:
        self.roster, self.limits, self.now = Roster(limits), limits, 0.0
        self.alive: dict[int, Start] = {}
        self.placed: dict[int, int] = {}  # commits, by member with a rank
        self.waiting: dict[int, int] = {}
        self.told: set[int] = set()
        self.leaving: set[int] = set()  # members whose slots are gone
        self.formed: list[Form] = []
        self.outcome: Outcome | None = None
        self.obeying = False
        self.find(**slots)

    def find(self, **slots: int) -> None:
        gone = {number for number, each in self.alive.items() if each.slot >= slots.get(each.host.name, 0)}
        self.leaving |= gone
        self.roster.find_hosts([Host(name, number) for name, number in slots.items()])
        self.step()

    def step(self, later: float = 0.0) -> list[Action]:
        self.now += later
        if self.obeying or self.outcome is not None:
            return []
        actions = self.roster.step(self.now)
        due = self.roster.next_time()
        assert due is None or due > self.now, "the launcher would step again and again"
        self.obeying = True  # as in a launcher, all actions of a step come before the next one
        for action in actions:
            self._obey(action)
        self.obeying = False
        return [*actions, *self.step()] if any(isinstance(each, End) for each in actions) else actions

    def come(self, number: int, commits: int = -1) -> None:
        self.placed.pop(number, None)
        self.waiting[number] = commits
        self.roster.come(number, commits, self.now)
        self.step()

    def end(self, number: int, failure: Failure | None = None) -> None:
        for members in (self.alive, self.placed, self.waiting):
            members.pop(number, None)  # type: ignore[attr-defined]
        self.roster.lose(number, failure, self.now)
        self.step()

    def kill(self, number: int) -> None:
        self.end(number, Failure(rank=number, reason="was killed by SIGKILL", code=137, killed=True))

    def lose_and_return(self, number: int, commits: int) -> None:
        """Kill a rank; the others notice it and come back with the state of so many commits."""
        others = [each for each in self.placed if each != number]
        self.kill(number)
        for other in others:
            self.come(other, commits)

    def _obey(self, action: Action) -> None:
        if isinstance(action, Start):
            here = [each.slot for each in self.alive.values() if each.host == action.host]
            assert action.slot < action.host.slots and action.slot not in here
            self.alive[action.number] = action
        elif isinstance(action, Form):
            self._check_form(action)
            self.formed.append(action)
            self.placed = {number: self.waiting.pop(number) for number in action.members}
            self.told.clear()
        elif isinstance(action, Tell):
            assert set(action.members) <= set(self.placed) and not self.told & set(action.members)
            self.told |= set(action.members)
        elif isinstance(action, End):
            assert action.number in self.alive
            others = [commits for each, commits in {**self.placed, **self.waiting}.items() if each != action.number]
            assert self.waiting.get(action.number, -1) < 0 or max(others) >= 0, "the state is lost with its last member"
            self.end(action.number)
        else:
            self.outcome = action

    def _check_form(self, form: Form) -> None:
        assert form.generation == len(self.formed)
        assert self.limits.least <= len(form.members) <= self.limits.most
        assert set(form.members) <= set(self.waiting) and len(set(form.members)) == len(form.members)
        assert set(self.placed) <= self.leaving, "a rank of the last generation still trains"
        newest = max(self.waiting[number] for number in form.members)
        assert self.waiting[form.members[0]] == newest, "rank 0 must have the newest state"
        assert newest >= 0 or max([*self.waiting.values(), *self.placed.values()]) < 0, "a state is left out"
        hosts = [self.alive[number].host.name for number in form.members]
        assert hosts == sorted(hosts, key=hosts.index), "the ranks of a host stand together"
        assert form.slots == tuple(self.alive[number].slot for number in form.members)


def test_a_job_forms_when_the_wanted_ranks_are_there() -> None:
    world = World(a=2, b=2)
    assert [(each.host.name, each.slot) for each in world.alive.values()] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    world.come(3)
    world.come(0)
    assert not world.formed
    world.come(1)
    assert world.formed == [Form(0, (0, 1, 3), (0, 1, 1))]


def test_a_job_begins_with_fewer_ranks_when_its_time_is_over() -> None:
    world = World(a=4)
    world.come(0)
    world.come(1)
    world.step(29.0)
    assert not world.formed
    world.step(2.0)
    assert [form.members for form in world.formed] == [(0, 1)]


def test_survivors_go_on_and_a_new_rank_takes_the_slot_of_the_lost_one() -> None:
    world = World(replace(LIMITS, most=3), a=3)
    for number in range(3):
        world.come(number)
    world.lose_and_return(0, commits=7)
    assert world.formed[-1] == Form(1, (1, 2), (1, 2))
    world.step(2.0)  # the host's rest is over
    assert world.alive[3].slot == 0
    world.come(3)
    assert world.told == {1, 2}
    world.come(1, 9)
    world.come(2, 9)
    assert world.formed[-1] == Form(2, (1, 2, 3), (1, 2, 0))


def test_the_newest_state_becomes_rank_0() -> None:
    world = World(replace(LIMITS, most=3), a=1, b=1, c=1)
    for number in range(3):
        world.come(number)
    world.kill(2)
    world.come(0, 3)
    world.come(1, 4)
    assert world.formed[-1].members == (1, 0)


def test_a_host_that_fails_often_rests_longer_and_longer() -> None:
    world = World(replace(LIMITS, least=1, wanted=1, most=2), a=1, b=1)
    world.come(0)
    rests = []
    for number in range(1, 12):
        world.kill(number)
        began = world.now
        while number + 1 not in world.alive:
            world.step(0.5)
        rests.append(world.now - began)
    assert all(0.9 * 2**turn <= rest <= 1.3 * 2**turn + 0.5 for turn, rest in enumerate(rests[:8]))
    assert rests[-1] == 300.0


def test_a_host_that_goes_is_left_at_the_next_step() -> None:
    world = World(a=2, b=2)
    for number in range(4):
        world.come(number)
    world.find(a=2)
    assert world.told
    for number in sorted(world.placed):
        world.come(number, 1)
    assert set(world.formed[-1].members) == {0, 1}
    assert {start.host.name for start in world.alive.values()} == {"a"}


def test_too_few_ranks_end_the_job_when_the_patience_is_over() -> None:
    world = World(a=1)
    world.come(0)
    world.step(61.0)
    assert world.outcome is not None and "2 are needed (--min-np): waited 61 s" in world.outcome.problem


def test_a_newcomer_alone_does_not_begin_anew() -> None:
    world = World(replace(LIMITS, least=1, wanted=1, most=2), a=2)
    world.come(0)
    world.come(1)
    world.come(0, 5)
    assert world.formed[-1].members == (0, 1)
    world.kill(0)  # before rank 1 has taken over its state
    world.come(1)
    assert world.outcome is not None and "no rank is left that has the state" in world.outcome.problem


def test_the_last_member_with_the_state_outlives_its_slot() -> None:
    world = World(replace(LIMITS, least=1, wanted=2, most=2), a=1, b=1)
    world.come(0)
    world.come(1)
    world.find(a=1)
    world.come(1, 5)
    assert 1 in world.alive  # the other one may be lost before it comes
    world.kill(0)
    assert world.formed[-1].members == (1,) and not world.told
    world.step(10.0)
    world.come(2)
    assert world.told == {1}
    world.come(1, 6)
    assert world.formed[-1].members == (1, 2) and world.told == {1, 2}
    world.come(2, 7)
    world.come(1, 7)
    assert world.formed[-1].members == (2,) and set(world.alive) == {2}


def test_a_member_without_a_slot_may_finish_the_training() -> None:
    world = World(replace(LIMITS, least=1, wanted=2, most=2), a=1, b=1)
    world.come(0)
    world.come(1)
    world.find(a=1)
    world.end(1)
    world.end(0)
    assert world.outcome is not None and world.outcome.failure is None and not world.outcome.problem


def test_members_that_a_new_launcher_does_not_find_are_no_failure_of_the_job() -> None:
    roster = Roster(LIMITS)
    roster.find_hosts([Host("a", 2)])
    for number in range(2):
        roster.expect(number, "a", number, 0.0)
    roster.adopt(1, "a", 1, rank=0, generation=3, now=1.0)
    roster.lose(0, Failure(rank=0, reason="it did not call the new launcher", code=1, killed=True), 15.0)
    roster.lose(1, None, 16.0)
    assert roster.step(16.0) == [Outcome(None, members=(1,))]
    assert roster.generation == 3


def test_ranks_that_lose_one_before_any_state_was_made_begin_anew() -> None:
    world = World(a=3)
    for number in range(3):
        world.come(number)
    world.lose_and_return(0, commits=-1)
    assert world.formed[-1].members == (1, 2)


def test_the_limit_of_resets_ends_the_job() -> None:
    world = World(replace(LIMITS, least=1, resets=1), a=3)
    for number in range(3):
        world.come(number)
    world.lose_and_return(0, commits=1)
    world.lose_and_return(1, commits=2)
    assert world.outcome is not None and "exceeded the limit of 1" in world.outcome.problem


def test_a_process_that_ends_before_the_ranks_have_met_is_named() -> None:
    world = World(replace(LIMITS, most=3), a=3)
    world.come(0)
    world.end(1)
    assert world.outcome is not None and "never called init()" in world.outcome.problem


def test_programs_that_never_meet_run_to_their_end() -> None:
    world = World(replace(LIMITS, most=3), a=3)
    for number in range(3):
        assert world.outcome is None
        world.end(number)
    assert world.outcome == Outcome(None)


def test_a_newcomer_that_ends_well_before_it_has_a_place_is_replaced() -> None:
    """Its program may end before it reaches the training; the rest of its host keeps it from being started at once."""
    world = World(replace(LIMITS, most=3, wanted=2), a=2)
    world.come(0)
    world.come(1)
    world.find(a=3)
    assert 2 in world.alive
    world.end(2)
    assert 3 not in world.alive and world.outcome is None
    world.step(2.0)
    world.come(3)
    world.come(0, 1)
    world.come(1, 1)
    assert world.formed[-1].members == (0, 1, 3)
    for number in (0, 1, 3):
        world.end(number)
    assert world.outcome == Outcome(None, members=(0, 1, 3))


def test_a_newcomer_that_was_told_to_end_is_none_any_more() -> None:
    world = World(replace(LIMITS, most=3, wanted=2), a=2)
    world.come(0)
    world.come(1)
    world.find(a=3)
    assert world.roster.is_newcomer(2)
    world.find(a=2)
    assert not world.roster.is_newcomer(2)
    world.end(2)
    assert world.outcome is None


def test_a_member_that_was_sent_away_waits_for_nobody() -> None:
    """It had waited for as long as members are borne that do not come; its process ends later."""
    world = World(a=2, b=1)
    for number in range(3):
        world.come(number)
    world.come(0, commits=1)
    world.come(2, commits=2)
    world.find(a=4)
    world.come(3)
    world.come(4)
    actions = world.roster.step(world.now + LIMITS.patience)
    assert [type(each) for each in actions] == [End, Form, End]
    assert world.roster.step(world.now + LIMITS.patience + 1.0) == []


def test_a_member_that_has_to_leave_does_not_order_the_others() -> None:
    """Its host came first for its state, so that a member there without a state became rank 0."""
    world = World(replace(LIMITS, most=3), a=2, b=1)
    for number in range(3):
        world.come(number)
    world.kill(0)
    world.find(a=1, b=1)
    world.come(1, commits=2)
    world.step(2.0)
    world.come(3)
    world.come(2, commits=1)
    assert world.formed[1].members == (2, 3)


EVENTS = st.lists(
    st.tuples(st.sampled_from(["come", "kill", "return", "time", "hosts"]), st.integers(0, 11), st.integers(0, 3)),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_any_sequence_of_losses_and_hosts(events: list[tuple[str, int, int]]) -> None:
    """Whatever happens, `World` finds each generation sound; at the end hosts stay and the job goes on."""
    world, commits = World(a=2, b=1, c=2), 0
    for kind, pick, slots in events:
        starting = [number for number in world.alive if number not in world.placed and number not in world.waiting]
        choices = {"come": starting, "kill": list(world.alive), "return": list(world.placed)}.get(kind, [])
        if kind == "time":
            world.step(float(pick))
        elif kind == "hosts":
            world.find(**{name: slots + place for place, name in enumerate("abc") if pick >> place & 1})
        elif choices and world.outcome is None:
            number = choices[pick % len(choices)]
            if kind == "come":
                world.come(number)
            elif kind == "kill":
                world.kill(number)
            else:
                commits += 1
                world.come(number, commits)
        if world.outcome is not None:
            assert world.outcome.problem or world.outcome.failure is not None
            return
    world.find(a=4)
    for _ in range(40):
        world.step(10.0)
        if world.outcome is not None:
            return
        for number in list(world.alive):
            if (
                number in world.alive
                and number not in world.waiting
                and (number in world.told or number not in world.placed)
            ):
                world.come(number, commits if number in world.placed else -1)
    assert len(world.placed) == 4, (world.alive, world.placed, world.waiting)


@pytest.mark.parametrize("size", [2, 3])
def test_the_expected_place_of_a_new_member(size: int) -> None:
    world = World(replace(LIMITS, most=size + 1), a=size, b=1)
    assert world.roster.expected(size) == (size, ["a"] * size + ["b"])
