"""HTTP reward server: grading on another machine, or for another trainer.

    python -m trainer.rewards.server --host 127.0.0.1 --port 5000

`POST /get_reward` takes what OpenRLHF-M's server and OpenRLHF's client send, with the reference answers
as labels:

    {"query": [...], "prompts": [...], "labels": [...], "answer_types": [...]}
    -> {"rewards": [...], "scores": [...], "format_rewards": [...], "acc_rewards": [...],
        "verdicts": [...], "whys": [...], "extra_logs": {"accuracy": [...], "format": [...]}}

`prompts` and `answer_types` may be left out. A label is never looked up by the text of a prompt. The
server also answers `GET /health` and `GET /metrics` (Prometheus text).
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import ipaddress
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, get_args

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainer import config
from trainer.algorithm.traces import Outcome
from trainer.config import ConfigError
from trainer.data.schema import AnswerType
from trainer.rewards.byte_queue import ByteQueue, QueueFull
from trainer.rewards.connection_guard import GuardedProtocol
from trainer.rewards.grading import grader
from trainer.rewards.grading.stated_answers import FORMS
from trainer.rewards.remote import TOKEN_VARIABLE
from trainer.rewards.scorer import Scorer

GRACE_S = 10
"""Time for the requests that are being graded when the server is told to stop."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What a server accepts."""

    body_bytes: int = 64 << 20
    """Largest request; a larger one gets a 413."""
    queue_bytes: int = 1 << 30
    """Memory for all requests that are being read, wait or are being graded. A request beyond gets a 503 with
    the seconds after which it may be sent again."""
    body_timeout_s: float = 60.0
    """Time for a body to arrive; a later one gets a 408."""
    batch: int = 4096
    """Most completions of a request; one with more gets a 422."""


COMPLETION_BYTES = 3 << 10
"""Memory of a completion that waits, besides its texts: its task, its place in the queue."""

_ASSISTANT = re.compile(
    r"<\|im_start\|>assistant\n|<\|start_header_id\|>assistant<\|end_header_id\|>\s*"
    r"|<start_of_turn>model\n|<\|assistant\|>\s*"
)
_SPECIAL = r"(?:<[|｜][^<>|｜\s]{1,40}[|｜]>|</?s>|<(?:pad|eos|bos|unk|end_of_turn)>|\[(?:PAD|EOS|SEP)\])"
_TOKEN = re.compile(_SPECIAL)
_TOKEN_LENGTH = 44  # characters of a match, at most
_LEADING = re.compile(rf"\A(?:\s*{_SPECIAL})+\s*")


def response_of(query: str) -> str:
    """The completion, without special tokens at both ends.

    It is what follows the start of the last assistant turn of a chat, or all of `query`.
    """
    start = 0
    for turn in _ASSISTANT.finditer(query):
        start = turn.end()
    completion = query[start:]
    return _LEADING.sub("", completion[: _content_end(completion)], count=1)


def _content_end(completion: str) -> int:
    """Position at which the special tokens at the end start, with the space around them.

    The text is read backwards, in linear time.
    """
    content = len(completion)
    end = _spaces_begin(completion, content)
    while end:
        earliest = max(0, end - _TOKEN_LENGTH)
        first = max(completion.rfind("<", earliest, end), completion.rfind("[", earliest, end))
        if first < 0 or not _TOKEN.fullmatch(completion, first, end):
            break
        end = content = _spaces_begin(completion, first)
    return content


def _spaces_begin(text: str, end: int) -> int:
    while end and text[end - 1].isspace():
        end -= 1
    return end


@dataclass(frozen=True)
class GradingRequest:
    """A request to grade: lists of equal length."""

    completions: list[str]
    references: list[str]
    answer_types: list[str]
    questions: list[str]

    def size_bytes(self) -> int:
        """Memory that it takes until it is graded."""
        texts = chain(self.completions, self.references, self.questions)
        return sum(map(sys.getsizeof, texts)) + COMPLETION_BYTES * len(self.completions)


def parse_request(body: bytes, limit: int) -> GradingRequest:
    """Reads a request.

    A fault of one row (null, no text, half a surrogate pair) costs that row alone.

    Raises:
        HTTPException: 422 if this is no such request, or if its lists differ in length.
    """
    try:
        sent = json.loads(body, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise HTTPException(422, f"no JSON: {str(error)[:200]}") from None
    if not isinstance(sent, dict):
        raise HTTPException(422, "send a JSON object with query and labels")
    columns: dict[str, list[Any]] = {}
    for name in ("query", "labels", "prompts", "answer_types"):
        values = sent.get(name)
        if values is None and name in ("prompts", "answer_types"):
            continue
        if not isinstance(values, list) or not values:
            raise HTTPException(422, f"{name}: send a list with an entry for each completion")
        columns[name] = values
        if len(values) != len(columns["query"]):
            raise HTTPException(
                422, f"{len(columns['query'])} queries but {len(values)} {name}: lengths must agree"
            )
    if len(columns["query"]) > limit:
        raise HTTPException(422, f"{len(columns['query'])} completions in one request: send at most {limit}")
    known = get_args(AnswerType)
    unknown = set()
    for answer_type in columns.get("answer_types", ()):
        if answer_type not in known:
            unknown.add(str(answer_type))
    if unknown:
        raise HTTPException(422, f"unknown answer_types {sorted(unknown)[:5]}: use {', '.join(known)}")

    queries = map(_text, columns["query"])
    references = list(map(_text, columns["labels"]))
    questions = columns.get("prompts") or [""] * len(references)
    return GradingRequest(
        completions=list(map(response_of, queries)),
        references=references,
        answer_types=columns.get("answer_types") or list(map(grader.classify, references)),
        questions=list(map(_text, questions)),
    )


def _text(value: Any) -> str:
    """`value` if it is text, the digits of a number, and empty text for anything else."""
    if isinstance(value, str):
        return value
    return str(value) if type(value) in (int, float) else ""


async def read_body(request: Request, limits: ServerLimits, queue: ByteQueue) -> bytes:
    """The whole body of a request, for which the queue holds room that the caller gives back.

    A body that is refused is read to its end and dropped, else the client would see a reset.

    Raises:
        HTTPException: 408, 413; Full.
    """
    body = bytearray()
    size = 0
    full: QueueFull | None = None
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for piece in request.stream():
                size += len(piece)
                if size <= limits.body_bytes and full is None:
                    try:
                        queue.take(len(piece))
                        body += piece
                        continue
                    except QueueFull as error:
                        full = error
                queue.give(len(body))
                body.clear()
    except BaseException as error:
        queue.give(len(body))
        if isinstance(error, TimeoutError):
            raise HTTPException(408, f"the body did not arrive within {limits.body_timeout_s:g} s") from None
        raise
    if size > limits.body_bytes:
        raise HTTPException(413, f"request above {limits.body_bytes} bytes: send fewer completions at a time")
    if full is not None:
        raise full
    return bytes(body)


class CountedReplies:
    """Middleware that counts replies by status.

    It is plain ASGI: FastAPI's own kind of middleware would pass every piece of a body through a queue.
    """

    def __init__(self, app: ASGIApp, statuses: Counter[int]):
        self.app = app
        self.statuses = statuses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.statuses[message["status"]] += 1
            await send(message)

        await self.app(scope, receive, counted)


def create_app(settings: config.Rewards, limits: ServerLimits | None = None, token: str = "") -> FastAPI:
    """The application, which has one scorer from start to shutdown."""
    limits = limits or ServerLimits()
    scorer = Scorer(replace(settings, remote_url="", max_timeout_rate=1.0, max_error_rate=1.0))
    verdicts: Counter[str] = Counter()
    statuses: Counter[int] = Counter()
    held: Counter[str] = Counter()
    """`completions` that wait or are being graded, and requests whose client has `left` since the start."""
    queue = ByteQueue(limits.queue_bytes)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        yield
        scorer.close()

    app = FastAPI(title="reward server", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    def authorize(request: Request) -> None:
        header = request.headers.get("authorization", "")
        sent = request.query_params.get("token") or header.removeprefix("Bearer ")
        if token and not hmac.compare_digest(sent.encode(), token.encode()):
            raise HTTPException(
                401, f"send the token of {TOKEN_VARIABLE} as Authorization: Bearer … or as ?token=…"
            )

    @app.exception_handler(QueueFull)
    async def busy(_: Request, full: QueueFull) -> Response:
        after = {"Retry-After": str(full.retry_after_s)}
        return JSONResponse({"detail": "busy: send this again"}, status_code=503, headers=after)

    app.add_middleware(CountedReplies, statuses=statuses)

    async def graded(request: Request, asked: GradingRequest) -> dict[str, Any] | None:
        """The reply to a request; None, and what was not begun is dropped, if its client leaves."""
        columns = asked.completions, asked.references, asked.answer_types, asked.questions
        batch = await run_in_threadpool(scorer.begin, *columns)
        done = asyncio.gather(*map(asyncio.wrap_future, batch.futures.values()))
        left = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait({done, left}, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                return None
            outcomes = await run_in_threadpool(scorer.finish, batch)
            return _reply(outcomes, [grade.why if grade else "" for grade in batch.graded])
        finally:
            done.cancel()
            left.cancel()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        authorize(request)
        lines = ["# TYPE reward_answers_total counter"]
        for verdict, count in sorted(verdicts.items()):
            lines.append(f'reward_answers_total{{verdict="{verdict}"}} {count}')
        lines.append("# TYPE reward_responses_total counter")
        for status, count in sorted(statuses.items()):
            lines.append(f'reward_responses_total{{status="{status}"}} {count}')

        single = (
            ("reward_answers_in_flight", "gauge", held["completions"]),
            ("reward_queue_bytes", "gauge", queue.held_bytes),
            ("reward_queue_limit_bytes", "gauge", queue.limit_bytes),
            ("reward_clients_left_total", "counter", held["left"]),
            ("reward_grader_restarts_total", "counter", int(scorer.stats()["perf/grader_restarts"])),
        )
        for name, kind, value in single:
            lines.append(f"# TYPE {name} {kind}")
            lines.append(f"{name} {value}")
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    @app.post("/get_reward")
    async def get_reward(request: Request) -> Response:
        authorize(request)
        body = await read_body(request, limits, queue)
        try:
            asked = await run_in_threadpool(parse_request, body, limits.batch)
        finally:
            queue.give(len(body))
        del body
        size = asked.size_bytes()
        queue.take(size)
        held["completions"] += len(asked.completions)
        try:
            reply = await graded(request, asked)
        finally:
            held["completions"] -= len(asked.completions)
            queue.give(size, finished=True)
        if reply is None:
            held["left"] += 1
            return Response(status_code=499)
        verdicts.update(reply["verdicts"])
        # FastAPI would validate a dictionary value by value.
        return Response(json.dumps(reply), media_type="application/json")

    return app


def _reply(outcomes: Sequence[Outcome], whys: Sequence[str]) -> dict[str, Any]:
    """What a client gets: OpenRLHF's keys, our verdicts, and why a completion was not graded."""
    rewards = []
    accuracies = []
    formats = []
    verdicts = []
    for outcome in outcomes:
        rewards.append(_finite(outcome.reward))
        accuracies.append(_finite(outcome.accuracy))
        formats.append(outcome.format)
        verdicts.append(outcome.verdict)
    return {
        "rewards": rewards,
        "scores": accuracies,
        "format_rewards": formats,
        "acc_rewards": accuracies,
        "verdicts": verdicts,
        "whys": whys,
        "extra_logs": {"accuracy": accuracies, "format": formats},
    }


async def _gone(request: Request) -> None:
    """Ends when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _finite(value: float) -> float | None:
    """The value, or null where it is not finite: JSON has no such numbers."""
    return value if math.isfinite(value) else None


def check_host(host: str, token: str) -> None:
    """Raises ConfigError for an address that is open to the world, or to other machines without a token."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(
            f"--host {host}: give an IP address, 127.0.0.1 or that of the cluster's network"
        ) from None
    if address.is_unspecified or address.is_global:
        raise ConfigError(
            f"--host {host} is open to the world: give 127.0.0.1 or the address of the cluster's network"
        )
    if not address.is_loopback and not token:
        raise ConfigError(
            f"--host {host} is reachable from other machines: set {TOKEN_VARIABLE} here and in the trainer"
        )


def main() -> None:
    """Runs the server until SIGTERM."""
    parser = argparse.ArgumentParser(description="Reward server: POST /get_reward, GET /health, GET /metrics")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; never all of them")
    parser.add_argument("--port", type=int, default=5000)
    parser.add_argument("--config", default="", help="run configuration whose `rewards` section applies")
    parser.add_argument("--answer", choices=FORMS, help="where completions state their answer")
    parser.add_argument("--workers", type=int, help="grader processes")
    parser.add_argument("--deadline-s", type=float, help="seconds per completion")
    parser.add_argument(
        "--queue-gib", type=float, default=1.0, help="memory for requests that wait or are being graded"
    )
    options = parser.parse_args()
    settings = config.load(options.config).rewards if options.config else config.Rewards()
    given = {"answer": options.answer, "workers": options.workers, "deadline_s": options.deadline_s}
    for name, value in given.items():
        if value is not None:
            settings = replace(settings, **{name: value})
    token = os.environ.get(TOKEN_VARIABLE, "")
    try:
        check_host(options.host, token)
        if options.queue_gib < 0.25:
            raise ConfigError(
                f"--queue-gib {options.queue_gib:g}: give 0.25 or more, for the largest requests"
            )
        limits = ServerLimits(queue_bytes=int(options.queue_gib * 2**30))
        app = create_app(settings, limits, token)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    uvicorn.run(
        app,
        host=options.host,
        port=options.port,
        http=GuardedProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE_S,
    )


if __name__ == "__main__":
    main()
