"""Ranks find each other, or hear who is missing; nobody waits for ever, and strangers delay nobody."""

import contextlib
import logging
import os
import queue
import random
import resource
import socket
import time
import tracemalloc
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.errors import AuthenticationError, ConfigError, RendezvousError
from farandole.meeting import acceptor
from farandole.meeting import server as rendezvous_server
from farandole.meeting.addresses import split_address
from farandole.meeting.frames import HEAD, LENGTH, encode, frame, recv_frame
from farandole.meeting.handshake import MAGIC, new_secret
from farandole.meeting.rendezvous import (
    Rendezvous,
    RendezvousServer,
    SoloRendezvous,
    TcpRendezvous,
    ThreadRendezvous,
    from_environment,
)
from farandole.meeting.rounds import Caller, Meeting, RoundResult, _Packed, decode_result, encode_result
from farandole.meeting.server import MAX_PAYLOAD, Request
from farandole.topology import JobEnvironment
from helpers.authentication import authenticate
from helpers.strangers import crowd

SECRET = new_secret()
SOON = timedelta(seconds=0.3)
MEANWHILE = timedelta(seconds=3)  # runs out too, but not before those who come together have come
LATER = timedelta(seconds=60)


def gather(each: Rendezvous, payload: bytes = b"", timeout: timedelta = LATER) -> RoundResult:
    """One rank's all-gather; an error is a value, so that a test sees what every rank got."""
    try:
        return each.allgather(payload, timeout=timeout)
    except RendezvousError as error:
        return error


def together(ranks: list[Rendezvous], timeout: timedelta = LATER, payload: bytes = b"rank %d") -> list[RoundResult]:
    """All of `ranks` at once, each in a thread of its own."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        waiting = [pool.submit(gather, each, payload % each.rank, timeout) for each in ranks]
        return [each.result(90) for each in waiting]


def tcp(server: RendezvousServer, size: int, generation: int = 0) -> list[Rendezvous]:
    return [TcpRendezvous(server.address, rank, size, SECRET, generation) for rank in range(size)]


def everybody(size: int) -> list[bytes]:
    return [b"rank %d" % rank for rank in range(size)]


def error_of(answer: RoundResult) -> RendezvousError:
    assert isinstance(answer, RendezvousError)
    return answer


class TestMeeting:
    """The decisions, without carriers."""

    @given(st.permutations([(round, rank) for round in range(3) for rank in range(4)]))
    def test_order_of_arrival_changes_nothing(self, arrivals: list[tuple[int, int]]) -> None:
        meeting, answers = Meeting(4), dict[int, RoundResult]()
        for ticket, (round, rank) in enumerate(arrivals):
            caller = Caller(rank=rank, size=4, generation=0, round=round)
            answers |= meeting.arrive(ticket, caller, b"%d.%d" % (round, rank), now=0, deadline=9)
        for ticket, (round, _) in enumerate(arrivals):
            assert answers[ticket] == [b"%d.%d" % (round, rank) for rank in range(4)]
        assert meeting.next_deadline() is None

    @given(st.lists(st.tuples(st.sampled_from("alex"), st.integers(0, 3), st.integers(0, 2)), max_size=40))
    def test_everyone_who_stays_gets_exactly_one_answer(self, events: list[tuple[str, int, int]]) -> None:
        meeting, answered, waiting, now = Meeting(3), set[int](), set[int](), 0.0
        for ticket, (what, number, round) in enumerate(events):
            now += 1
            answers: dict[int, RoundResult] = {}
            if what == "a":
                waiting.add(ticket)
                caller = Caller(rank=number, size=3, generation=0, round=round)
                answers = meeting.arrive(ticket, caller, b"", now=now, deadline=now + 5)
            elif what == "l" and waiting:
                leaves = min(waiting)
                waiting.discard(leaves)
                answers = meeting.leave(leaves)
            elif what == "e":
                answers = meeting.expire(now)
            elif what == "x":
                answers = meeting.depart(number % 3, "gone")
            assert answers.keys() <= waiting
            assert not answered & answers.keys()
            answered |= answers.keys()
            waiting -= answers.keys()
        assert meeting.expire(now + 100).keys() == waiting

    def test_a_rank_that_comes_too_late_hears_so_once_and_can_try_again(self) -> None:
        meeting = Meeting(2)
        callers = [Caller(rank=rank, size=2, generation=0, round=0) for rank in range(2)]
        assert meeting.arrive(0, callers[0], b"", now=0, deadline=1) == {}
        assert error_of(meeting.expire(1)[0]).missing == (1,)
        assert "too late: the others waited 1 s" in str(meeting.arrive(1, callers[1], b"", now=2, deadline=9)[1])
        assert meeting.arrive(2, callers[1], b"b", now=3, deadline=9) == {}
        assert meeting.arrive(3, callers[0], b"a", now=3, deadline=9) == {2: [b"a", b"b"], 3: [b"a", b"b"]}

    def test_a_new_generation_ends_the_one_before(self) -> None:
        meeting = Meeting(2)
        assert meeting.arrive(0, Caller(rank=0, size=2, generation=0, round=0), b"", now=0, deadline=9) == {}
        answers = meeting.arrive(1, Caller(rank=0, size=2, generation=1, round=0), b"", now=0, deadline=9)
        assert "generation 0 is over: generation 1 has begun" in str(answers[0])
        late = meeting.arrive(2, Caller(rank=1, size=2, generation=0, round=0), b"", now=0, deadline=9)
        assert "generation 0 is over" in str(late[2])

    @pytest.mark.parametrize(
        "caller", [Caller(rank=0, size=3, generation=1, round=0), Caller(rank=2, size=2, generation=1, round=0)]
    )
    def test_a_rank_of_another_job_ends_no_generation(self, caller: Caller) -> None:
        meeting = Meeting(2)
        mine = [Caller(rank=rank, size=2, generation=0, round=0) for rank in range(2)]
        assert meeting.arrive(0, mine[0], b"a", now=0, deadline=9) == {}
        assert "this job has 2 ranks" in str(meeting.arrive(1, caller, b"", now=0, deadline=9)[1])
        assert meeting.arrive(2, mine[1], b"b", now=0, deadline=9) == {0: [b"a", b"b"], 2: [b"a", b"b"]}

    def test_who_departs_and_hangs_up_is_missing_whichever_comes_first(self) -> None:
        for departs_first in (True, False):
            meeting = Meeting(3)
            for rank in range(2):
                assert (
                    meeting.arrive(rank, Caller(rank=rank, size=3, generation=0, round=0), b"", now=0, deadline=9) == {}
                )
            if departs_first:  # what it has said counts as long as it may still hear the answer
                assert meeting.depart(1, "ended") == {}
                answers = meeting.leave(1)
            else:
                assert meeting.leave(1) == {}
                answers = meeting.depart(1, "ended")
            assert answers.keys() == {0}
            assert error_of(answers[0]).missing == (1,)

    @given(st.lists(st.binary(max_size=20), max_size=5))
    def test_answers_survive_the_wire(self, payloads: list[bytes]) -> None:
        assert decode_result(encode_result(payloads), "here", 1 << 30) == payloads

    @pytest.mark.parametrize("payload", [b"alike" * 50, bytes(range(250))])
    def test_answers_of_many_ranks_survive_the_wire_in_few_bytes(self, payload: bytes) -> None:
        written = encode_result([payload] * 4096)
        assert decode_result(written, "here", 1 << 21) == [payload] * 4096
        assert len(written) < 4096 * 250 / 20

    def test_answers_that_cannot_be_compressed_stay_as_they_are(self) -> None:
        payloads = [os.urandom(250) for _ in range(4096)]
        written = encode_result(payloads)
        assert decode_result(written, "here", 1 << 21) == payloads
        assert 4096 * 250 < len(written) < 4096 * 260

    @pytest.mark.parametrize("harm", ["large", "cut", "changed", "followed"])
    def test_a_packed_answer_that_is_damaged_or_too_large_is_an_error(self, harm: str) -> None:
        content = encode_result([b"a"])
        packed = zlib.compress(content * 1000 if harm == "large" else content)
        if harm == "cut":
            packed = packed[:-1]
        if harm == "changed":
            packed = packed[:-1] + bytes([packed[-1] ^ 1])
        if harm == "followed":
            packed += b"x"
        with pytest.raises(RendezvousError, match=r"the answer cannot be read: its content is (damaged|cut short)"):
            decode_result(encode(_Packed(packed)), "here", 1 << 10)

    def test_errors_survive_the_wire(self) -> None:
        got = error_of(decode_result(encode_result(RendezvousError("they slept", (2, 5))), "10.0.0.1:4", 1 << 20))
        assert got.args == ("they slept", (2, 5), "10.0.0.1:4")

    @given(st.binary(max_size=40))
    def test_any_bytes_are_an_answer_or_an_error(self, frame: bytes) -> None:
        try:
            decode_result(frame, "", 1 << 20)
        except RendezvousError as error:
            assert "the answer" in str(error)


class TestTcp:
    @pytest.mark.parametrize("size", [1, 2, 5])
    def test_all_get_all_payloads_in_rank_order(self, size: int) -> None:
        with RendezvousServer(size, SECRET) as server:
            ranks = tcp(server, size)
            for _ in range(3):
                assert together(ranks) == [everybody(size)] * size

    def test_large_and_empty_payloads(self) -> None:
        payloads = [bytes(MAX_PAYLOAD), b""]
        with RendezvousServer(2, SECRET) as server, ThreadPoolExecutor(2) as pool:
            got = list(pool.map(gather, tcp(server, 2), payloads))
        assert got == [payloads, payloads]

    def test_a_payload_that_is_too_large(self) -> None:
        with pytest.raises(RendezvousError, match=f"over the limit of {MAX_PAYLOAD}"):
            TcpRendezvous("127.0.0.1:1", 0, 1, SECRET).allgather(bytes(MAX_PAYLOAD + 1), timeout=LATER)

    def test_the_rank_that_never_comes_is_named_to_all_others(self) -> None:
        with RendezvousServer(4, SECRET) as server:
            ranks = tcp(server, 4)
            for answer in together([ranks[0], ranks[1], ranks[3]], timeout=MEANWHILE):
                assert error_of(answer).missing == (2,)
                assert error_of(answer).where == server.address
                assert "missing: rank 2. Look at the output of rank 2" in str(answer)
            assert "came too late" in str(gather(ranks[2]))
            assert together(ranks) == [everybody(4)] * 4  # nothing is left of the failure

    def test_the_first_to_lose_patience_ends_the_wait_of_all(self) -> None:
        with RendezvousServer(3, SECRET) as server, ThreadPoolExecutor(2) as pool:
            ranks = tcp(server, 3)
            waits = [pool.submit(gather, ranks[0], b"", LATER), pool.submit(gather, ranks[1], b"", MEANWHILE)]
            assert [error_of(each.result(60)).missing for each in waits] == [(2,), (2,)]

    def test_two_generations(self) -> None:
        with RendezvousServer(2, SECRET) as server, ThreadPoolExecutor(1) as pool:
            old, new = tcp(server, 2), tcp(server, 2, generation=1)
            assert together(old) == [everybody(2)] * 2
            waits = pool.submit(gather, old[0])
            _until(lambda: server._meeting.next_deadline() is not None)
            assert together(new) == [everybody(2)] * 2
            assert "generation 0 is over: generation 1 has begun" in str(waits.result(60))
            assert "generation 0 is over" in str(gather(old[1]))

    def test_the_server_may_start_after_the_ranks(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        ranks: list[Rendezvous] = [TcpRendezvous(f"127.0.0.1:{port}", rank, 2, SECRET) for rank in range(2)]
        with ThreadPoolExecutor(2) as pool:
            waits = [pool.submit(gather, each, b"rank %d" % each.rank) for each in ranks]
            with pytest.raises(TimeoutError):
                waits[0].result(0.1)
            with RendezvousServer(2, SECRET, port=port):
                assert [each.result(60) for each in waits] == [everybody(2)] * 2

    def test_a_server_that_never_starts(self) -> None:
        with pytest.raises(RendezvousError, match=r"rank 3 could not reach .* within 0\.3 s: .*Connection refused"):
            TcpRendezvous("127.0.0.1:1", 3, 4, SECRET).allgather(b"", timeout=SOON)

    def test_close_ends_the_search_for_a_server(self) -> None:
        rank = TcpRendezvous("127.0.0.1:1", 0, 2, SECRET)
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(gather, rank)
            rank.close()
            assert "the rendezvous was closed" in str(waits.result(60))

    def test_two_processes_with_one_rank(self) -> None:
        with RendezvousServer(2, SECRET) as server, ThreadPoolExecutor(1) as pool:
            first, second = tcp(server, 2), tcp(server, 2)
            waits = pool.submit(gather, first[0], b"rank 0")
            _until(lambda: server._meeting.next_deadline() is not None)
            assert "rank 0 came twice: two processes were started as rank 0" in str(gather(second[0]))
            assert gather(first[1], b"rank 1") == everybody(2) == waits.result(60)

    def test_a_rank_that_dies_while_it_waits_can_come_again(self) -> None:
        with RendezvousServer(2, SECRET) as server, ThreadPoolExecutor(1) as pool:
            caller = Caller(rank=0, size=2, generation=0, round=0)
            with socket.create_connection(split_address(server.address), 60) as sock:
                authenticate(sock, SECRET, me=encode(caller), accept=False, timeout=LATER)
                sock.sendall(frame(encode(Request(20.0, False, b"x"))))
                _until(lambda: server._meeting.next_deadline() is not None)
            _until(lambda: server._meeting.next_deadline() is None)
            ranks = tcp(server, 2)
            waits = pool.submit(gather, ranks[1], b"rank 1")
            assert gather(ranks[0], b"rank 0") == everybody(2) == waits.result(60)

    def test_who_departs_ends_the_wait_of_the_others_at_once(self) -> None:
        with RendezvousServer(3, SECRET) as server:
            ranks = tcp(server, 3)
            with ThreadPoolExecutor(1) as pool:
                waits = pool.submit(gather, ranks[0])
                _until(lambda: server._meeting.next_deadline() is not None)
                server.depart(2, "rank 2 has ended")
                for answer in (waits.result(60), gather(ranks[1])):
                    assert error_of(answer).missing == (2,)
                    assert "rank 2 has ended" in str(answer)
            assert together(tcp(server, 3, generation=1)) == [everybody(3)] * 3
        server.depart(1, "after the end")

    def test_who_departs_before_anybody_comes_is_missing_in_a_later_generation(self) -> None:
        with RendezvousServer(2, SECRET, generation=3) as server:
            server.depart(0, "member 7 is lost")
            answer = gather(tcp(server, 2, generation=3)[1])
            assert "member 7 is lost" in str(answer) and error_of(answer).missing == (0,)

    def test_another_idea_of_the_size(self) -> None:
        with RendezvousServer(2, SECRET) as server:
            answer = gather(TcpRendezvous(server.address, 0, 3, SECRET))
        assert "this job has 2 ranks, but rank 0 was started as one of 3" in str(answer)

    def test_closing_the_server_ends_every_wait(self) -> None:
        with ThreadPoolExecutor(1) as pool:
            with RendezvousServer(2, SECRET) as server:
                waits = pool.submit(gather, tcp(server, 2)[0])
                _until(lambda: server._meeting.next_deadline() is not None)
            assert "broke off" in str(waits.result(60))
            server.close()  # once more does no harm

    def test_ipv6(self) -> None:
        with RendezvousServer(1, SECRET, host="::1") as server:
            assert server.address.startswith("[::1]:")
            assert together(tcp(server, 1)) == [everybody(1)]

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
    def test_it_never_listens_everywhere(self, host: str) -> None:
        with pytest.raises(ConfigError, match="name one interface's address"):
            RendezvousServer(1, SECRET, host=host)

    def test_what_cannot_be_a_server(self) -> None:
        with pytest.raises(ConfigError, match="size: must be >= 1, got 0"):
            RendezvousServer(0, SECRET)
        with pytest.raises(ConfigError, match="secret: must be at least 16 bytes"):
            RendezvousServer(1, b"short")

    def test_more_ranks_than_open_files(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
        with pytest.raises(
            ConfigError, match=r"size: 1000 ranks need 1[0-9]+ open files .* have 1024; raise ulimit -n"
        ):
            RendezvousServer(1000, SECRET)

    def test_the_secret_is_shown_nowhere(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.DEBUG), RendezvousServer(1, SECRET) as server:
            rank = TcpRendezvous(server.address, 0, 1, SECRET)
            stranger = gather(TcpRendezvous(server.address, 0, 1, new_secret()))
            told = f"{server!r} {rank!r} {stranger!r} {stranger} {vars(stranger)} {caplog.text}"
        assert SECRET.hex() not in told
        assert repr(SECRET)[2:-1] not in told


def test_ranks_share_one_answer_in_the_servers_memory() -> None:
    """The answer grows with the ranks: copies for 4096 of them would take gigabytes."""
    size, payload = 24, bytes(200_000)
    with RendezvousServer(size, SECRET) as server, contextlib.ExitStack() as stack:
        for rank in range(size):
            sock = stack.enter_context(socket.create_connection(split_address(server.address), 60))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            me = encode(Caller(rank=rank, size=size, generation=0, round=0))
            authenticate(sock, SECRET, me=me, accept=False, timeout=LATER)
            if rank == size - 1:
                tracemalloc.start()
                stack.callback(tracemalloc.stop)
            sock.sendall(frame(encode(Request(60.0, False, payload))))
        assert sock.recv(1)  # the answers have been made; nobody reads more of them
        assert tracemalloc.get_traced_memory()[1] < 5 * size * len(payload)


class TestStrangers:
    def test_a_wrong_secret_fails_at_once_and_disturbs_nobody(self) -> None:
        with RendezvousServer(2, SECRET) as server, ThreadPoolExecutor(1) as pool:
            ranks = tcp(server, 2)
            waits = pool.submit(gather, ranks[0], b"rank 0")
            began = time.monotonic()
            with pytest.raises(AuthenticationError, match="does not know this job's secret"):
                TcpRendezvous(server.address, 1, 2, new_secret()).allgather(b"evil", timeout=LATER)
            assert time.monotonic() - began < 30
            assert gather(ranks[1], b"rank 1") == everybody(2) == waits.result(60)

    def test_crowds_of_silent_strangers_delay_nobody(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(acceptor, "MOST_UNPROVEN", 8)
        with RendezvousServer(3, SECRET) as server:
            address = split_address(server.address)
            strangers = [socket.create_connection(address, 5) for _ in range(40)]
            try:
                for each in strangers[::3]:
                    each.send(MAGIC[:4])
                assert together(tcp(server, 3)) == [everybody(3)] * 3
                # The oldest were shown the door; their places went to others.
                assert _ends(strangers[0])
            finally:
                for each in strangers:
                    each.close()

    def test_members_that_come_at_once_are_not_taken_for_strangers(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """They would come again and again, and a large job would never meet."""
        monkeypatch.setattr(acceptor, "MOST_UNPROVEN", 8)
        with RendezvousServer(40, SECRET) as server, contextlib.ExitStack() as stack:
            for _ in range(40):
                silent = stack.enter_context(socket.create_connection(split_address(server.address), 60))
            silent.settimeout(0.3)
            with pytest.raises(TimeoutError):
                silent.recv(1)
        assert "made way" not in caplog.text

    def test_a_crowd_that_comes_and_goes_fails_nobody(self) -> None:
        with RendezvousServer(3, SECRET) as server, crowd([server.address], 500):
            for generation in range(5):
                assert together(tcp(server, 3, generation)) == [everybody(3)] * 3

    def test_a_stranger_is_given_little_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(acceptor, "HANDSHAKE_TIMEOUT", timedelta(seconds=0.2))
        with (
            RendezvousServer(1, SECRET) as server,
            socket.create_connection(split_address(server.address), 60) as stranger,
        ):
            assert _ends(stranger)

    @pytest.mark.parametrize("seed", range(5))
    def test_garbage_is_answered_by_the_end_of_the_connection(self, seed: int) -> None:
        with (
            RendezvousServer(1, SECRET) as server,
            socket.create_connection(split_address(server.address), 60) as stranger,
        ):
            stranger.sendall(random.Random(seed).randbytes(5000))
            assert _ends(stranger)
            assert together(tcp(server, 1)) == [everybody(1)]

    @pytest.mark.parametrize(
        "request_",
        [
            LENGTH.pack(MAX_PAYLOAD + HEAD + 1),
            frame(encode(Request(1.0, False, bytes(MAX_PAYLOAD + 1)))),
            frame(encode(Request(float("nan"), False, b"x"))),
            frame(encode(Request(-1.0, False, b"x"))),
            frame(encode(Caller(rank=0, size=1, generation=0, round=0))),
            frame(LENGTH.pack(100_000) + b"[" * 100_000),
        ],
    )
    def test_a_request_that_cannot_be(self, request_: bytes) -> None:
        with (
            RendezvousServer(1, SECRET) as server,
            socket.create_connection(split_address(server.address), 60) as sock,
        ):
            me = encode(Caller(rank=0, size=1, generation=0, round=0))
            authenticate(sock, SECRET, me=me, accept=False, timeout=LATER)
            sock.sendall(request_)
            assert _ends(sock)

    def test_a_member_that_is_no_rank(self) -> None:
        with (
            RendezvousServer(1, SECRET) as server,
            socket.create_connection(split_address(server.address), 60) as sock,
        ):
            assert authenticate(sock, SECRET, me=b"curious", accept=False, timeout=LATER) == b"rendezvous"
            assert _ends(sock)

    def test_who_speaks_out_of_turn(self) -> None:
        with (
            RendezvousServer(2, SECRET) as server,
            socket.create_connection(split_address(server.address), 60) as sock,
        ):
            me = encode(Caller(rank=0, size=2, generation=0, round=0))
            authenticate(sock, SECRET, me=me, accept=False, timeout=LATER)
            sock.sendall(frame(encode(Request(20.0, False, b""))))
            _until(lambda: server._meeting.next_deadline() is not None)
            sock.sendall(b"and another thing")
            assert _ends(sock)

    def test_a_server_that_is_somebody_else(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as impostor, ThreadPoolExecutor(1) as pool:
            rank = TcpRendezvous(f"127.0.0.1:{impostor.getsockname()[1]}", 0, 2, SECRET)
            waits = pool.submit(gather, rank)
            sock, _ = impostor.accept()
            with sock, pytest.raises(AuthenticationError):
                authenticate(sock, new_secret(), me=b"", accept=True, timeout=LATER)
            assert isinstance(waits.result(60), AuthenticationError)


class TestDeaths:
    def test_the_others_hear_at_once_of_a_rank_that_ends_before_its_goodbye(self) -> None:
        lost: queue.SimpleQueue[RendezvousError] = queue.SimpleQueue()
        with RendezvousServer(3, SECRET) as server, ThreadPoolExecutor(3) as pool:
            ranks = [TcpRendezvous(server.address, rank, 3, SECRET) for rank in range(3)]
            met = list(pool.map(lambda each: each.allgather_and_watch(b"", lost.put, timeout=LATER), ranks))
            assert [payloads for payloads, _ in met] == [[b""] * 3] * 3
            met[0][1].close()  # it needs nobody any more, and nobody needs it
            met[1][1].close(failed=True)
            error = lost.get(timeout=60)
            assert error.missing == (1,) and "rank 1 has ended while the ranks connected" in str(error)
            assert lost.empty()
            assert error_of(gather(tcp(server, 3)[2])).missing == (1,)
            met[2][1].close()

    def test_a_rank_that_ends_before_it_has_read_its_answer(self) -> None:
        """The answer of a large job is larger than the buffers of its connection; another rank reads slowly, too."""
        size, payload = 6, bytes(rendezvous_server.MAX_PAYLOAD)
        lost: queue.SimpleQueue[RendezvousError] = queue.SimpleQueue()
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(RendezvousServer(size, SECRET))
            raw = []
            for rank in (4, 5):
                raw.append(stack.enter_context(socket.create_connection(split_address(server.address), 60)))
                me = encode(Caller(rank=rank, size=size, generation=0, round=0))
                authenticate(raw[-1], SECRET, me=me, accept=False, timeout=LATER)
                raw[-1].sendall(frame(encode(Request(60.0, True, payload))))
            pool = stack.enter_context(ThreadPoolExecutor(4))
            ranks = [TcpRendezvous(server.address, rank, size, SECRET) for rank in range(4)]
            met = list(pool.map(lambda each: each.allgather_and_watch(payload, lost.put, timeout=LATER), ranks))
            for _, lifeline in met:
                stack.callback(lifeline.close)
            raw[1].close()
            assert [lost.get(timeout=60).missing for _ in met] == [(5,)] * 4
            assert decode_result(recv_frame(raw[0], 1 << 24), "", 1 << 24) == [payload] * size
            error = error_of(decode_result(recv_frame(raw[0], 1 << 24), "", 1 << 24))
            assert error.missing == (5,) and "rank 5 has ended while the ranks connected" in str(error)

    def test_a_rank_that_ends_while_it_waits_is_named_soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rendezvous_server, "REJOIN_SECONDS", 0.2)
        with RendezvousServer(3, SECRET) as server, ThreadPoolExecutor(1) as pool:
            waits = pool.submit(gather, tcp(server, 3)[1], b"", LATER)
            caller = Caller(rank=0, size=3, generation=0, round=0)
            with socket.create_connection(split_address(server.address), 60) as sock:
                authenticate(sock, SECRET, me=encode(caller), accept=False, timeout=LATER)
                sock.sendall(frame(encode(Request(50.0, False, b""))))
                _until(lambda: any(len(room.payloads) == 2 for room in server._meeting._rooms.values()))
            error = error_of(waits.result(60))
            assert error.missing == (0,) and "rank 0 has ended while it waited" in str(error)


class TestThreads:
    @pytest.mark.parametrize("size", [1, 2, 5])
    def test_all_get_all_payloads_in_rank_order(self, size: int) -> None:
        ranks: list[Rendezvous] = list(ThreadRendezvous.group(size))
        for _ in range(20):
            assert together(ranks) == [everybody(size)] * size

    def test_the_rank_that_never_comes_is_named(self) -> None:
        ranks: list[Rendezvous] = list(ThreadRendezvous.group(3))
        assert [error_of(each).missing for each in together(ranks[:2], timeout=MEANWHILE)] == [(2,), (2,)]

    def test_a_rank_that_closes_ends_the_wait_of_the_others_at_once(self) -> None:
        ranks = ThreadRendezvous.group(3)
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(gather, ranks[0])
            ranks[2].close()
            for answer in (waits.result(60), gather(ranks[1])):
                assert error_of(answer).missing == (2,)
                assert "rank 2 has closed its rendezvous" in str(answer)

    def test_a_rank_that_has_come_may_close_before_the_others_leave(self) -> None:
        ranks = ThreadRendezvous.group(2)

        def come_and_go(each: ThreadRendezvous) -> RoundResult:
            answer = gather(each, b"rank %d" % each.rank)
            each.close()
            return answer

        for _ in range(50):
            with ThreadPoolExecutor(2) as pool:
                assert list(pool.map(come_and_go, ranks)) == [everybody(2)] * 2
            ranks = ThreadRendezvous.group(2)

    def test_each_rank_has_a_list_of_its_own(self) -> None:
        one, two = together(list(ThreadRendezvous.group(2)))
        assert one == two
        assert one is not two

    def test_one_object_is_shared(self) -> None:
        ranks = ThreadRendezvous.group(4)
        made: list[object] = []

        def make() -> object:
            made.append(object())
            return made[-1]

        with ThreadPoolExecutor(4) as pool:
            got = list(pool.map(lambda each: each.shared("segment", make), ranks))
        assert len(made) == 1
        assert all(each is made[0] for each in got)
        assert ranks[0].shared("another", make) is not made[0]

    def test_who_cannot_make_it_lets_the_next_one_try(self) -> None:
        ranks = ThreadRendezvous.group(2)

        def fail() -> int:
            raise MemoryError("no room")

        with pytest.raises(MemoryError):
            ranks[0].shared("segment", fail)
        assert ranks[1].shared("segment", lambda: 7) == 7


class TestFromEnvironment:
    def test_alone(self) -> None:
        rendezvous = from_environment({})
        assert isinstance(rendezvous, SoloRendezvous)
        assert (rendezvous.rank, rendezvous.size, rendezvous.generation) == (0, 1, 0)
        assert rendezvous.allgather(b"me", timeout=SOON) == [b"me"]
        rendezvous.close()

    def test_started_by_a_launcher(self) -> None:
        with RendezvousServer(1, SECRET) as server:
            job = JobEnvironment(rank=0, size=1, rendezvous=server.address, secret=SECRET, generation=3)
            rendezvous = from_environment(job.write())
            assert (rendezvous.rank, rendezvous.size, rendezvous.generation) == (0, 1, 3)
            assert rendezvous.allgather(b"me", timeout=LATER) == [b"me"]

    @pytest.mark.parametrize(
        "kind", [SoloRendezvous(), TcpRendezvous("h:1", 0, 1, SECRET), ThreadRendezvous.group(1)[0]]
    )
    def test_all_kinds_keep_the_contract(self, kind: object) -> None:
        assert isinstance(kind, Rendezvous)


def _until(what: Callable[[], bool]) -> None:
    """Wait for the server's thread, which tells nobody what it has just done."""
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _ends(sock: socket.socket) -> bool:
    """Does the peer end the connection, before it says anything?"""
    sock.settimeout(60)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True  # it did not read all that we sent
