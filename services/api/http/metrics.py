"""Prometheus metrics of the HTTP API: requests, tool calls, choices, grammars and token latencies."""

from collections.abc import Iterable
from enum import Enum
from functools import cache
from typing import Final

from prometheus_client import CollectorRegistry, Counter

from baton.telemetry.histogram import LoopHistogram

TTFT_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
ITL_BUCKETS_S: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
    300,
    600,
)
"""Bucket bounds of the histogram of inter-token latency, in seconds. If a request continues in another room
after a failure, the gap between two tokens may be as long as a request may take."""
STATUSES: Final = frozenset((200, 400, 401, 404, 405, 408, 413, 414, 415, 421, 429, 431, 499, 500, 501, 503))
"""HTTP statuses that have their own time series. Others count as "other". 499: the client disconnected before
the response began."""
OTHER: Final = "other"
NO_ROUTE: Final = "none"
GIVEN: Final = "given"
LEFT_OUT: Final = "left_out"
UNFINISHED: Final = "unfinished"
READ: Final = "read"
UNREAD: Final = "unread"


class GrammarOutcome(Enum):
    """Outcome of compiling the grammar that constrains an answer."""

    COMPILED = "compiled"
    REFUSED = "refused"
    NOT_SURVIVED = "not_survived"


class HttpMetrics:
    """Prometheus metrics of the HTTP API, on an injected registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "baton_http_requests",
            "HTTP requests answered, by route and status. A stream that breaks off counts with the status of"
            " its error. Requests of /health and /ready are not counted.",
            ["route", "status"],
            registry=registry,
        )
        self._grammars = Counter(
            "baton_grammars",
            "Grammars that constrain answers, by the outcome of compiling them: compiled, refused as"
            " invalid, or not_survived, because the compiling process ran out of time or memory.",
            ["outcome"],
            registry=registry,
        )
        for judged in GrammarOutcome:
            self._grammars.labels(judged.value)
        self._calls = Counter(
            "baton_tool_calls",
            "Tool calls in answers: read, or unread because they could not be parsed and were returned as"
            " text.",
            ["outcome"],
            registry=registry,
        )
        for outcome in (READ, UNREAD):
            self._calls.labels(outcome)
        choices = Counter(
            "baton_choices",
            "Choices that were generated: given to the client; left_out because better ones were returned"
            " (best_of); or unfinished because the request failed or its client disconnected.",
            ["outcome"],
            registry=registry,
        )
        self._choices = {outcome: choices.labels(outcome) for outcome in (GIVEN, LEFT_OUT, UNFINISHED)}
        self._answered = cache(self._requests.labels)
        """Function that returns the request counter for a route and a status. It is cached, because the
        library's look-up is slow."""
        self.first_token = LoopHistogram(
            "baton_time_to_first_token_seconds",
            "Time from the arrival of an HTTP request to the first output token of a choice.",
            TTFT_BUCKETS_S,
            registry,
        )
        self.inter_token = LoopHistogram(
            "baton_inter_token_latency_seconds",
            "Time between two output tokens of a choice.",
            ITL_BUCKETS_S,
            registry,
        )
        self.expect([NO_ROUTE])

    def expect(self, routes: Iterable[str]) -> None:
        """Create the time series of the request counter for these path templates, with value 0, before the
        first request."""
        for route in routes:
            for status in (*sorted(map(str, STATUSES)), OTHER):
                self._answered(route, status)

    def count_request(self, route: str | None, status: int) -> None:
        """Count a request by route and status. `route`: path template, one of the application's fixed set.
        None: no route matched."""
        label = str(status) if status in STATUSES else OTHER
        self._answered(NO_ROUTE if route is None else route, label).inc()

    def count_grammar(self, outcome: GrammarOutcome) -> None:
        """Count the outcome of compiling one grammar. A result from the cache is not counted again."""
        self._grammars.labels(outcome.value).inc()

    def count_choices(self, finished: int, unfinished: int, given: int | None) -> None:
        """Count the choices of one request. `given`: number of finished choices that were returned. None: all
        of them."""
        left_out = 0 if given is None else max(finished - given, 0)
        for outcome, count in ((GIVEN, finished - left_out), (LEFT_OUT, left_out), (UNFINISHED, unfinished)):
            if count:
                self._choices[outcome].inc(count)

    def count_calls(self, read: int, unread: int) -> None:
        """Count the tool calls in the answers of one request. `read`: number of parsed calls. `unread`:
        number of malformed calls, which are returned as text."""
        if read:
            self._calls.labels(READ).inc(read)
        if unread:
            self._calls.labels(UNREAD).inc(unread)
