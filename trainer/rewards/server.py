"""HTTP reward server: grading on another machine, or for another trainer.

    python -m trainer.rewards.server --host 127.0.0.1 --port 5000

`POST /get_reward` takes what the original's server takes, and the labels with it:

    {"query": [...], "prompts": [...], "labels": [...], "answer_types": [...]}       answer_types may be left out
    -> {"rewards": [...], "format_rewards": [...], "acc_rewards": [...], "verdicts": [...]}

A label is never looked up by the text of a prompt. `GET /health` and `GET /metrics` (Prometheus text) beside it.
"""

from __future__ import annotations

import argparse
import hmac
import ipaddress
import os
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool

from trainer import config
from trainer.algorithm.records import Outcome
from trainer.config import ConfigError
from trainer.rewards.grading import grader
from trainer.rewards.remote import TOKEN_VARIABLE
from trainer.rewards.scorer import Rewards

_ASSISTANT = "<|im_start|>assistant\n"
_ENDS = ("<|im_end|>", "<|endoftext|>", "<｜end▁of▁sentence｜>")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a server takes on."""

    body_bytes: int = 64 << 20
    """Largest request; more is a 413."""
    batch: int = 4096
    """Most answers per request; more is a 422."""
    in_flight: int = 16_384
    """Most answers being graded at once; a request beyond is a 503, to be sent again later."""


class RewardRequest(BaseModel):
    """Body of /get_reward."""

    model_config = ConfigDict(extra="ignore", strict=True)

    query: list[str] = Field(min_length=1)
    prompts: list[str] | None = None
    labels: list[str]
    answer_types: list[str] | None = None

    def check(self, limit: int) -> None:
        """Raises HTTPException 422 where the lists do not fit each other."""
        for name in ("prompts", "labels", "answer_types"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.query):
                raise HTTPException(422, f"{len(self.query)} queries but {len(values)} {name}: lengths must agree")
        if len(self.query) > limit:
            raise HTTPException(422, f"{len(self.query)} answers in one request: send at most {limit}")
        unknown = set(self.answer_types or ()) - {"letter", "number", "text", "math"}
        if unknown:
            raise HTTPException(422, f"unknown answer_types {sorted(unknown)}: use letter, number, text or math")


class RewardReply(BaseModel):
    """Reply of /get_reward, in the order of the queries."""

    rewards: list[float]
    format_rewards: list[float]
    acc_rewards: list[float]
    verdicts: list[str]


def response_of(query: str) -> str:
    """The model's answer: after the last assistant turn of a chat in ChatML, end tokens off; else the whole query."""
    answer = query.rpartition(_ASSISTANT)[2]
    for end in _ENDS:
        answer = answer.removesuffix("\n").removesuffix(end)
    return answer


def create_app(settings: config.Rewards, limits: Limits | None = None, token: str = "") -> FastAPI:
    """The application. Holds its grader from start-up to shutdown."""
    limits = limits or Limits()
    rewards = Rewards(replace(settings, remote_url="", max_timeout_rate=1.0))
    verdicts: Counter[str] = Counter()
    statuses: Counter[int] = Counter()
    in_flight = 0

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        yield
        rewards.close()

    app = FastAPI(title="reward server", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    def authorize(request: Request) -> None:
        sent = request.headers.get("authorization", "")
        if token and not hmac.compare_digest(sent.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, f"send the token of {TOKEN_VARIABLE} as Authorization: Bearer …")

    async def body_of(request: Request) -> bytes:
        too_large = HTTPException(413, f"request above {limits.body_bytes} bytes: send fewer answers at a time")
        if int(request.headers.get("content-length") or 0) > limits.body_bytes:
            raise too_large
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > limits.body_bytes:
                raise too_large
        return bytes(body)

    @app.middleware("http")
    async def count(request: Request, call_next):
        response = await call_next(request)
        statuses[response.status_code] += 1
        return response

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        authorize(request)
        lines = ["# TYPE reward_answers_total counter"]
        lines += [f'reward_answers_total{{verdict="{v}"}} {n}' for v, n in sorted(verdicts.items())]
        lines += ["# TYPE reward_responses_total counter"]
        lines += [f'reward_responses_total{{status="{s}"}} {n}' for s, n in sorted(statuses.items())]
        lines += ["# TYPE reward_answers_in_flight gauge", f"reward_answers_in_flight {in_flight}"]
        restarts = int(rewards.stats()["perf/grader_restarts"])
        lines += ["# TYPE reward_grader_restarts_total counter", f"reward_grader_restarts_total {restarts}"]
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    @app.post("/get_reward")
    async def get_reward(request: Request) -> RewardReply:
        nonlocal in_flight
        authorize(request)
        if in_flight >= limits.in_flight:
            raise HTTPException(503, "busy: send this again", headers={"Retry-After": "1"})
        try:
            asked = RewardRequest.model_validate_json(await body_of(request))
        except ValidationError as error:
            raise HTTPException(422, [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]) from None
        asked.check(limits.batch)
        if in_flight + len(asked.query) > max(limits.in_flight, limits.batch):
            raise HTTPException(503, "busy: send this again", headers={"Retry-After": "1"})
        in_flight += len(asked.query)
        try:
            outcomes = await run_in_threadpool(_score, rewards, asked)
        finally:
            in_flight -= len(asked.query)
        verdicts.update(o.verdict for o in outcomes)
        return RewardReply(
            rewards=[o.reward for o in outcomes],
            format_rewards=[o.format for o in outcomes],
            acc_rewards=[o.accuracy for o in outcomes],
            verdicts=[o.verdict for o in outcomes],
        )

    return app


def _score(rewards: Rewards, asked: RewardRequest) -> list[Outcome]:
    types: Sequence[str] = asked.answer_types or [grader.classify(label) for label in asked.labels]
    return rewards.score([response_of(q) for q in asked.query], asked.labels, types)


def check_host(host: str, token: str) -> None:
    """Raises ConfigError for an address that listens everywhere, or one beyond this machine without a token."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f"--host {host}: give an IP address, 127.0.0.1 or that of the cluster's network") from None
    if address.is_unspecified or address.is_global:
        raise ConfigError(f"--host {host} is open to the world: give 127.0.0.1 or the address of the cluster's network")
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
    parser.add_argument("--workers", type=int, help="grader processes")
    parser.add_argument("--deadline-s", type=float, help="seconds per answer")
    options = parser.parse_args()
    settings = config.load(options.config).rewards if options.config else config.Rewards()
    given = {"workers": options.workers, "deadline_s": options.deadline_s}
    settings = replace(settings, **{k: v for k, v in given.items() if v is not None})
    token = os.environ.get(TOKEN_VARIABLE, "")
    try:
        check_host(options.host, token)
        app = create_app(settings, token=token)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
