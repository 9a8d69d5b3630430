"""The HTTP service: questions as JSON, answers as the commands give them, and one page for people.

``POST /v1/analyze`` with ``{"model": "zoo:gpt2", "gpu": "T4"}`` answers with the JSON of ``graphmem analyze``. What
takes longer than ``wait`` seconds is a job: 202, with addresses to look at, to follow (server-sent events) and to
cancel (DELETE).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import shlex
import tempfile
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException

from graphmem import __version__
from graphmem.base.spellings import meant
from graphmem.cli.web.jobs import Busy, Job, Jobs, Limits, beats
from graphmem.cli.web.patience import WholeQuestions
from graphmem.cli.web.questions import ASKED, check_once, question_model, words_of, wrong
from graphmem.errors import UsageError
from graphmem.reports.document import clean

_PAGE = Path(__file__).with_name("page")
#: Seconds that an answer is waited for before it is a job, unless ``wait`` says other.
_WAIT, _LONGEST_WAIT = 30.0, 300.0
#: Bytes of a question, and where files are sent to, which are larger.
_QUESTION = 1 << 20
_FILES = "/v1/files"
#: Of every response; a report holds its own script and style, and reaches nothing.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'self'; base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_REPORT = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "frame-ancestors 'self'"
)
_log = logging.getLogger("graphmem.web")


def create_app(limits: Limits | None = None, *, a_minute: int = 120) -> FastAPI:
    """The service; ``a_minute``: requests of one client that are answered in a minute."""
    limits = limits or Limits()
    app = FastAPI(
        title="graphmem", version=__version__, summary=(__doc__ or "").splitlines()[0], lifespan=_life(limits)
    )
    app.state.metrics = _Metrics()
    app.add_middleware(WholeQuestions, most_bytes=_QUESTION, apart=_FILES)
    app.middleware("http")(_around(app, _Rate(a_minute)))
    app.add_exception_handler(RequestValidationError, _not_read)
    app.add_exception_handler(HTTPException, _not_there)
    for command in ASKED:
        _add_question(app, command)
    _add_files(app, limits)
    _add_jobs(app)
    _add_health(app)
    app.mount("/", StaticFiles(directory=_PAGE, html=True))
    return app


def _life(limits: Limits) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        with tempfile.TemporaryDirectory(prefix="graphmem-web-") as folder:
            app.state.jobs = Jobs(Path(folder), limits)
            yield
            await app.state.jobs.close()

    return life


# --- questions --------------------------------------------------------------------------------------------------------


def _add_question(app: FastAPI, command: str) -> None:
    model = question_model(command)

    async def ask(question: model, request: Request, wait: float = _WAIT) -> Response:  # type: ignore[valid-type]
        jobs: Jobs = request.app.state.jobs
        check_once(await request.body())
        words = words_of(command, question.model_dump(exclude_none=True), jobs.file)  # type: ignore[attr-defined]
        try:
            job, was_there = jobs.ask(words)
        except Busy:
            return _refused(503, "too many questions wait; ask again in a minute", {"Retry-After": "60"})
        request.app.state.metrics.asked.labels(command, "yes" if was_there else "no").inc()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(job.finished.wait(), max(0.0, min(wait, _LONGEST_WAIT)))
        return _answer(job)

    ask.__name__ = command
    ask.__annotations__["question"] = model
    about: dict[int | str, dict[str, Any]] = {
        202: {"description": "not finished: addresses to look at, to follow and to cancel"}
    }
    app.post(f"/v1/{command}", responses=about, summary=f"graphmem {command}", tags=["questions"])(ask)


async def _not_read(request: Request, error: Exception) -> Response:
    """What is wrong with a question, as one line."""
    assert isinstance(error, RequestValidationError)
    return _refused(422, "; ".join(wrong(one, request.url.path.rpartition("/")[2]) for one in error.errors()))


async def _not_there(request: Request, error: Exception) -> Response:
    """A path that there is not, or a method that it has not: one line too."""
    assert isinstance(error, HTTPException)
    path, methods = request.url.path, {one for route in request.app.routes for one in _methods(route, request.url.path)}
    if methods and request.method not in methods:
        allowed = ", ".join(sorted(methods))
        return _refused(405, f"{path} takes {allowed}, not {request.method}; see /docs", {"Allow": allowed})
    if error.status_code in (404, 405):
        return _refused(404, f"there is no {path}{_near(request)}; see /docs for all paths, and / for a page")
    return _refused(error.status_code, str(error.detail))


def _methods(route: object, path: str) -> Collection[str]:
    is_it = isinstance(route, APIRoute) and route.path_regex.match(path)
    return (route.methods or ()) if isinstance(route, APIRoute) and is_it else ()


def _near(request: Request) -> str:
    paths = [route.path for route in request.app.routes if isinstance(route, APIRoute)]
    return meant(request.url.path, paths, most=1)


def _answer(job: Job) -> Response:
    """The answer of a job that is done, its error, or where it is to be found later."""
    links = {"Link": f'</v1/jobs/{job.number}>; rel="self", </v1/jobs/{job.number}/report>; rel="alternate"'}
    if job.state == "done":
        words = clean(shlex.join(["graphmem", *job.words])).encode("ascii", "backslashreplace").decode()
        return Response(job.answer, headers={**links, "X-Command": words}, media_type="application/json")
    if job.is_lost:
        return _refused(503, job.error, {"Retry-After": "10"})
    if job.finished.is_set():
        return _refused(409 if job.state == "cancelled" else 422, job.error)
    base = f"/v1/jobs/{job.number}"
    return JSONResponse({**job.told(), "self": base, "events": f"{base}/events"}, 202, headers=links)


def _refused(status: int, words: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": words}, status, headers=headers)


def _add_files(app: FastAPI, limits: Limits) -> None:
    @app.post(_FILES, tags=["files"], summary="Send a file: .onnx, config.json, a memory snapshot, a report, .gguf")
    async def send(name: str, request: Request) -> Response:
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > limits.upload_bytes:
            return _refused(413, f"files of up to {limits.upload_bytes >> 20} MiB are taken")
        try:
            number = await asyncio.wait_for(request.app.state.jobs.keep(name, request.stream()), limits.seconds)
        except asyncio.TimeoutError:
            return _refused(408, f"the file did not arrive within {limits.seconds:.0f} s")
        return JSONResponse({"file": f"file:{number}"}, 201)


def _add_jobs(app: FastAPI) -> None:
    def found(request: Request, number: str) -> Job:
        job = request.app.state.jobs.job(number)
        if job is None:
            raise LookupError(f"there is no job {number}")
        return job  # type: ignore[no-any-return]

    @app.get("/v1/jobs/{number}", tags=["jobs"], summary="The answer, or how far it is")
    async def look(number: str, request: Request) -> Response:
        return _answer(found(request, number))

    @app.get("/v1/jobs/{number}/events", tags=["jobs"], summary="Server-sent events until the job is finished")
    async def follow(number: str, request: Request) -> Response:
        job = found(request, number)

        async def events() -> AsyncIterator[str]:
            async for told in beats(job):
                yield f"data: {json.dumps(told)}\n\n"

        return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    @app.get("/v1/jobs/{number}/report", tags=["jobs"], summary="The report as one page")
    async def report(number: str, request: Request) -> Response:
        job = found(request, number)
        if job.state != "done":
            return _answer(job)
        return HTMLResponse(job.page, headers={"Content-Security-Policy": _REPORT})

    @app.delete("/v1/jobs/{number}", tags=["jobs"], summary="Cancel a job")
    async def cancel(number: str, request: Request) -> Response:
        job = found(request, number)
        await request.app.state.jobs.cancel(job)
        return JSONResponse(job.told())


def _add_health(app: FastAPI) -> None:
    @app.get("/healthz", tags=["service"], summary="Whether the service runs")
    async def health() -> Response:
        return JSONResponse({"status": "ok", "version": __version__})

    @app.get("/metrics", tags=["service"], summary="Figures for Prometheus")
    async def metrics(request: Request) -> Response:
        return Response(request.app.state.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/choices", tags=["service"], summary="Cards, models and optimizers that are known")
    async def choices() -> Response:
        return JSONResponse(await asyncio.to_thread(_choices))


def _choices() -> dict[str, Any]:
    from graphmem.devices import all_devices
    from graphmem.sources.hub import known_models
    from graphmem.sources.zoo import zoo_entries

    models = [*(f"zoo:{entry.name}" for entry in zoo_entries()), *(f"hf:{name}" for name in known_models())]
    return {"gpus": [card.name for card in all_devices()], "models": models}


# --- around every request ---------------------------------------------------------------------------------------------


class _Metrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.asked = Counter("graphmem_questions", "Questions", ["command", "remembered"], registry=self._registry)
        self.seconds = Histogram("graphmem_seconds", "Seconds of a request", ["status"], registry=self._registry)
        self.open = Gauge("graphmem_open_requests", "Requests being answered", registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Rate:
    """Requests of a client in a minute: a bucket of so many, which fills again evenly."""

    def __init__(self, a_minute: int) -> None:
        self._most = float(a_minute)
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def takes(self, client: str) -> bool:
        now = time.monotonic()
        left, then = self._left.pop(client, (self._most, now))
        left = min(self._most, left + (now - then) * self._most / 60)
        self._left[client] = (left - 1 if left >= 1 else left, now)
        if len(self._left) > 10_000:
            self._left.popitem(last=False)
        return left >= 1


Next = Callable[[Request], Awaitable[Response]]


def _around(app: FastAPI, rate: _Rate) -> Callable[[Request, Next], Awaitable[Response]]:
    async def around(request: Request, following: Next) -> Response:
        began, number = time.monotonic(), secrets.token_hex(6)
        with app.state.metrics.open.track_inprogress():
            response = await _within_limits(request, following, rate)
        seconds = time.monotonic() - began
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        response.headers["X-Request-Id"] = number
        app.state.metrics.seconds.labels(str(response.status_code)).observe(seconds)
        line = {"request": number, "method": request.method, "path": request.url.path}
        _log.info(json.dumps({**line, "status": response.status_code, "seconds": round(seconds, 4)}))
        return response

    return around


async def _within_limits(request: Request, following: Next, rate: _Rate) -> Response:
    client = request.client.host if request.client else ""
    if request.url.path.startswith("/v1/") and not rate.takes(client):
        return _refused(429, "too many requests; ask again in a minute", {"Retry-After": "60"})
    length = request.headers.get("content-length", "0")
    if request.url.path != _FILES and length.isdigit() and int(length) > _QUESTION:
        return _refused(413, f"questions of up to {_QUESTION >> 10} KiB are taken")
    try:
        return await following(request)
    except UsageError as error:
        return _refused(422, str(error))
    except LookupError as error:
        return _refused(404, str(error.args[0]))
