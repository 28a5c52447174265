"""Requests to a store: concurrency that follows the latency, and repetition with back-off after passing failures."""

import logging
import os
import random
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Self, TypeVar

from farandole.errors import SourceError

log = logging.getLogger(__name__)

T = TypeVar("T")

LEAST_IN_FLIGHT, FIRST_IN_FLIGHT, MOST_IN_FLIGHT = 4, 16, 64
# Target rate: the number of requests in flight is this times the measured latency.
_PER_SECOND = 500
_MEASURED = 32  # latest requests; the fastest one gives the latency, because busy threads slow the others

_ATTEMPTS = 6
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds; each pause is twice the one before
# Seconds to wait for a free place. Clients end each request sooner, unless its body arrives in small pieces.
_PATIENCE = 300.0
# Seconds for which half as many requests are in flight after the store has refused one because of its load.
_CALM = 5.0


_TRUST = (
    "the store's certificate is not trusted. Name the file of its authority by AWS_CA_BUNDLE or "
    "{'client_kwargs': {'verify': file}}, for web servers by SSL_CERT_FILE"
)


class PassingFailure(Exception):
    """A request failed and may succeed when repeated; `busy` if the store refused it because of its load."""

    def __init__(self, text: str, *, busy: bool = False) -> None:
        super().__init__(text, busy)
        self.text, self.busy = text, busy

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Return a failure with the class and the text of a client's error."""
        return cls(f"{type(error).__name__}: {error}")

    def __str__(self) -> str:
        return self.text


class RequestLimiter:
    """Requests of one process to one store, from any thread. Can be pickled; the copy has no measurements."""

    def __init__(
        self, attempts: int = _ATTEMPTS, first_pause: float = _FIRST_PAUSE, patience: float = _PATIENCE
    ) -> None:
        self._attempts, self._first_pause, self._patience = attempts, first_pause, patience
        self._reset()
        self._seconds: deque[float] = deque(maxlen=_MEASURED)
        self._usual = FIRST_IN_FLIGHT  # requests in flight for the measured latency
        self._calm_until = 0.0

    def _reset(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._running = 0

    def __reduce__(self) -> tuple[type["RequestLimiter"], tuple[int, float, float]]:
        return type(self), (self._attempts, self._first_pause, self._patience)

    @property
    def most(self) -> int:
        """Return how many requests may be in flight now."""
        if self._calm_until and time.monotonic() < self._calm_until:
            return max(1, self._usual // 2)
        return self._usual

    def answered(self, began: float) -> None:
        """Measure the latency of a request that began at `began` (`time.monotonic`) and whose answer begins now.

        Bodies are not measured: they take longer with more requests in flight, which would raise the number further."""
        self._seconds.append(time.monotonic() - began)
        wanted = round(min(self._seconds) * _PER_SECOND)
        self._usual = max(LEAST_IN_FLIGHT, min(MOST_IN_FLIGHT, wanted))

    def call(self, url: str, request: Callable[[], T]) -> T:
        """Return the result of `request`; blocks while `most` requests are in flight, and between attempts.

        Raises `SourceError` naming the URL: when every attempt was a `PassingFailure`, with the last one; when no place
        becomes free within `patience` seconds; and for an untrusted certificate. Other errors are raised at once."""
        began = time.monotonic()
        for attempt in range(1, self._attempts + 1):
            try:
                return self._run(url, request)
            except PassingFailure as failure:
                if untrusted := _certificate_problem(failure):
                    raise SourceError(url, f"cannot be read: {untrusted}; {_TRUST}") from failure
                if attempt == self._attempts:
                    spent = time.monotonic() - began
                    problem = f"{failure} at attempt {attempt} of {attempt}, after {spent:.1f} s"
                    raise SourceError(url, f"cannot be read: {problem}") from failure
                pause = min(_LONGEST_PAUSE, self._first_pause * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
                log.info("%s at attempt %d of %d; again in %.2f s", failure, attempt, self._attempts, pause)
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _run(self, url: str, request: Callable[[], T]) -> T:
        if self._process != os.getpid():  # the requests in flight, and a lock that may be held, are of the parent
            self._reset()
        with self._changed:
            if self._running >= self.most and not self._changed.wait_for(
                lambda: self._running < self.most, self._patience
            ):
                problem = f"cannot be read: {self._running} requests in flight, none ended within {self._patience:g} s"
                raise SourceError(url, problem)
            self._running += 1
        try:
            return request()
        except PassingFailure as failure:
            if failure.busy:
                self._calm_until = time.monotonic() + _CALM
            raise
        finally:
            with self._changed:
                self._running -= 1
                # Wake only as many threads as can proceed: waking all of them would cost more than the request.
                self._changed.notify(max(0, self.most - self._running))


def _certificate_problem(failure: BaseException) -> str:
    """Return the certificate problem that caused a failure, "" if none did; clients wrap it in errors of their own."""
    each: BaseException | None = failure
    while each is not None:
        if isinstance(each, ssl.SSLCertVerificationError) and (message := getattr(each, "verify_message", "")):
            return str(message)  # aiohttp's error of this class lacks it
        each = each.__cause__ or each.__context__
    return ""
