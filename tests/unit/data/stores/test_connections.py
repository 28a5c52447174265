"""Requests over kept connections, their signatures, and pages of listings."""

import calendar
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("botocore")

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from farandole.data.stores.connections import BadResponse, Connections
from farandole.data.stores.request_limiter import PassingFailure
from farandole.data.stores.s3_listing import page_of
from farandole.data.stores.s3_signing import signed
from helpers.forks import forked

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nETag:  x \r\n\r\nbody"


@contextmanager
def serving(*connections: Sequence[bytes | list[bytes]]) -> Iterator[tuple[str, list[list[bytes]]]]:
    """Accept connections one after the other, and answer their requests with these bytes; then close each.

    Lists are sent item by item, slowly.

    Gives the server's name, and the requests of each connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(20)  # for a client that does not connect again
    seen: list[list[bytes]] = []

    def serve() -> None:
        for answers in connections:
            opened, _ = listener.accept()
            seen.append([])
            with opened, suppress(ConnectionError):  # which the client may have given up
                for answer in answers:
                    seen[-1].append(opened.recv(1 << 16))
                    for part in answer if isinstance(answer, list) else [answer]:
                        opened.sendall(part)
                        time.sleep(0.02 if isinstance(answer, list) else 0)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
    finally:
        thread.join()
        listener.close()


@pytest.fixture
def client() -> Iterator[Connections]:
    made = Connections(bundle="", timeout=(5.0, 5.0), most=2)
    yield made
    made.close()


def test_a_connection_serves_several_requests(client: Connections) -> None:
    with serving([OK, OK]) as (server, seen):
        for target in ("/a", "/b"):
            answer = client.get(server, target, {"Range": "bytes=0-3"})
            assert (answer.status, answer.headers["etag"], answer.body) == (200, "x", b"body")
    assert [[request.split(b"\r\n")[0] for request in each] for each in seen] == [
        [b"GET /a HTTP/1.1", b"GET /b HTTP/1.1"]
    ]
    assert b"Range: bytes=0-3\r\n" in seen[0][0]


def test_a_connection_that_was_closed_meanwhile_is_replaced(client: Connections) -> None:
    with serving([OK], [OK]) as (server, seen):
        assert [client.get(server, "/", {}).body for _ in range(2)] == [b"body"] * 2
    assert len(seen) == 2


def test_a_forked_process_leaves_kept_connections_to_its_parent(client: Connections) -> None:
    with serving([OK, OK], [OK]) as (server, seen):
        client.get(server, "/parent", {})
        child = forked(lambda: client.get(server, "/child", {}).body == b"body")
        client.get(server, "/parent", {})
        assert os.waitpid(child, 0) == (child, 0)
    assert [[request.split()[1] for request in each] for each in seen] == [[b"/parent", b"/parent"], [b"/child"]]


def test_a_new_connection_that_is_closed_without_an_answer_is_an_error(client: Connections) -> None:
    with serving([b""]) as (server, _), pytest.raises(OSError, match="without an answer"):
        client.get(server, "/", {})


def test_bodies_in_chunks_and_without_a_length(client: Connections) -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nmore: 1\r\n\r\n"
    until_closed = b"HTTP/1.1 200 OK\r\n\r\nrest"
    closing = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\nz"
    with serving([b"HTTP/1.1 100 Continue\r\n\r\n" + chunked, OK, until_closed], [closing], [OK]) as (server, _):
        assert [client.get(server, "/", {}).body for _ in range(5)] == [b"abcde", b"body", b"rest", b"z", b"body"]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nbody", "5 bytes short"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: nine\r\n\r\nbody", "no number"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "is cut"),
        (b"SSH-2.0-OpenSSH_9\r\n", "begins with"),
        (b"HTTP/1.1 OK\r\n\r\n", "begins with"),
        (b"HTTP/1.1 200 OK\r\na: " + b"b" * 140000 + b"\r\n\r\n", "too long"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 300 + b"\r\n", "too many headers"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(client: Connections, answer: bytes, told: str) -> None:
    with serving([answer]) as (server, _), pytest.raises(BadResponse, match=told):
        client.get(server, "/", {})


BEGIN = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("begin", "bit"),
    [
        (b"HT", b"T"),
        (BEGIN + b"X: ", b"x"),
        (BEGIN, b"a: b\r\n"),
        (BEGIN + b"Content-Length: 50\r\n\r\n", b"x"),
        (BEGIN + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        (BEGIN + b"\r\n", b"x"),
    ],
    ids=["first line", "a header", "many headers", "a body", "chunks", "a body without a length"],
)
def test_an_answer_that_trickles_is_given_up(begin: bytes, bit: bytes) -> None:
    client = Connections(bundle=None, timeout=(5.0, 0.1), most=2)
    bits = b"TP/1.1 200 OK\r\nab" if bit == b"T" else bit * 16
    size = len(bits) // 16
    trickling = [begin, *(bits[place : place + size] for place in range(0, len(bits), size))]
    with (
        serving([trickling]) as (server, _),
        pytest.raises(TimeoutError, match=r"only \d+ bytes have come within 0.1 s"),
    ):
        client.get(server, "/", {})


def test_a_server_that_says_nothing_has_a_deadline() -> None:
    client = Connections(bundle=None, timeout=(5.0, 0.05), most=2)
    with serving([[b"", b"", b"", b"", b""]]) as (server, _), pytest.raises(TimeoutError):
        client.get(server, "/", {})


@pytest.mark.parametrize("token", [None, "to/ken=="])
@pytest.mark.parametrize("query", ["", "list-type=2&prefix=a%2Fb%20c"])
def test_signatures_are_those_of_botocore(token: str | None, query: str) -> None:
    headers = {"Range": "bytes=0-9", "If-Match": '"0af  1"'}
    target = "/bucket/a%20b/x~y%3Dz" + (f"?{query}" if query else "")
    request = AWSRequest(method="GET", url=f"https://s3.test:9000{target}", headers=headers)
    credentials = Credentials("KEY", "se/cret", token)
    S3SigV4Auth(credentials, "s3", "eu-west-1").add_auth(request)
    now = calendar.timegm(time.strptime(request.context["timestamp"], "%Y%m%dT%H%M%SZ"))
    made = signed(credentials.get_frozen_credentials(), "eu-west-1", "s3.test:9000", target, headers, now)
    assert made["Authorization"] == request.headers["Authorization"]
    assert made.get("X-Amz-Security-Token") == token


def test_pages_of_listings() -> None:
    contents = "<Contents><Key>a%2Bb+c%C3%A4</Key><Size>7</Size><ETag>&quot;e&quot;</ETag></Contents>"
    more = "<IsTruncated>true</IsTruncated><NextContinuationToken>t+</NextContinuationToken>"
    for space in ("", ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'):
        page = f"<ListBucketResult{space}><EncodingType>url</EncodingType>{contents}{more}</ListBucketResult>"
        assert page_of(page.encode()) == ([("a+b cä", 7, '"e"')], "t+")
    plain = f"<ListBucketResult>{contents}<IsTruncated>false</IsTruncated></ListBucketResult>"
    assert page_of(plain.encode()) == ([("a%2Bb+c%C3%A4", 7, '"e"')], "")
    endless = b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>"
    for wrong in (b"<Error/>", b"<ListBucketResult>", endless):
        with pytest.raises(PassingFailure, match="the listing"):
            page_of(wrong)
