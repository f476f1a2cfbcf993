"""``nbkernels serve``: an Engine behind the OpenAI-compatible endpoints for completions and chats, on starlette and uvicorn.

    GET  /health                 {"status": "ok", "running": …, "waiting": …}
    GET  /v1/models              the one model
    POST /v1/completions         prompt: a string, several, or token ids
    POST /v1/chat/completions    messages, through the model's template

Streams are server-sent events. What a request asks for that is not had is refused with OpenAI's error objects, never left out in
silence:

    400 what is wrong with the call · 404 another model or path · 405, 415 not a POST of JSON · 408, 413 too slow or too large
    a body · 421 a name that is not this server's · 429 a full queue · 500 the text could not be completed · 503 the server
    shuts down, or has failed before

A client that leaves cancels its requests. When the process is told to end, nobody new is let in, texts have GRACE_S seconds to
be completed, and the rest end with an error object. There is neither a password nor encryption: it is meant for loopback, or to
stand behind something that has both. On loopback it answers to loopback's names alone, so that no page in a browser comes in
whose own name was made to point there ("DNS rebinding").
"""

import asyncio
import contextlib
import ipaddress
import json
import logging
import time
import uuid
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nbkernels.model.engine import QueueFull

MAX_BODY_BYTES = 2**20
BODY_S = 10  # for a body to come, no more than GRACE_S: half a body does not hold up the end of the server either
LAST_WORDS_S = 5  # for the errors that end texts to be read
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for completions; a chat may go on to the end of the context
MOST_PROMPTS = 64  # in one call for completions
MOST_STOPS, MOST_STOP_CHARACTERS = 4, 256  # of each: a text is held against the beginnings of all
MOST_SHOWN = 500  # characters of an error message
LOOPBACK = frozenset(("127.0.0.1", "localhost", "::1"))
GRACE_S = 10  # for texts under way when the process is told to end
LOG = logging.getLogger(__name__)
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
# accepted, and of no consequence here
IGNORED = frozenset(
    ("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
)
IGNORED_OF_MESSAGES = frozenset(("name", "tool_call_id"))
# what is not had, with the values that ask for nothing
NOT_HAD = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
KNOWN = {
    *SAMPLING, *IGNORED, *NOT_HAD, "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "stop", "stream",
    "stream_options", "speculate",
}  # fmt: skip
FINISH_REASONS = {"end": "stop", "stop": "stop", "length": "length"}


class RequestError(Exception):
    """What is wrong with a call, as OpenAI says it: an HTTP status and the fields of an error object."""

    def __init__(self, status, message, *, param=None, code=None, kind="invalid_request_error", headers=None):
        super().__init__(message)
        message, param = (text and text[:MOST_SHOWN] for text in (message, param))  # what callers wrote is in it
        self.status = status
        self.headers = headers
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def shutting_down():
    """The error of a text that the end of the server cuts off, or that comes too late."""
    return RequestError(503, "the server is shutting down", code="shutting_down", kind="server_error")


class ClientLeft(Exception):
    """The connection was closed before the answer was complete."""


class OnlyNamed:
    """An ASGI application that answers where a request's Host header is one of some names, with any port.

    starlette's TrustedHostMiddleware answers in plain text, not by an error object, and says nothing of what to do.
    """

    def __init__(self, app, names):
        self.app = app
        self.names = frozenset(name.lower() for name in names)

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            given = Headers(scope=scope).get("host", "")
            if _host_name(given) not in self.names:
                wrong = RequestError(421, f"host {given!r} is not this server: nbkernels serve --allow-host lets it be")
                await JSONResponse(wrong.body, wrong.status)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _host_name(host):
    """The name in a Host header, without its port, or None."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:  # brackets that don't close
        return None


def names_of(host, allowed=()):
    """The names that a server answers to which listens at a host: loopback's own and the allowed ones, else None for any."""
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host in LOOPBACK
    return {*LOOPBACK, host, *allowed} if loopback or allowed else None


def create_app(engine, name, *, max_body_bytes=MAX_BODY_BYTES, hosts=None):
    """The ASGI application of an Engine, whose thread runs while the application does.

    name: what its model is called; hosts: the names that requests may have in their Host header (default: any).
    """
    service = Service(engine, name, max_body_bytes)

    @contextlib.asynccontextmanager
    async def lifespan(_):
        engine.start()
        try:
            yield
        finally:
            await run_in_threadpool(engine.close)

    routes = [
        Route("/health", service.health),
        Route("/v1/models", service.models),
        Route("/v1/models/{model:path}", service.model),
        Route("/v1/completions", service.completions, methods=["POST"]),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
    ]
    handlers = {
        RequestError: lambda _, error: JSONResponse(error.body, error.status, headers=error.headers),
        ClientLeft: lambda *_: Response(status_code=499),  # nobody reads it
        HTTPException: _http_error,
        Exception: _server_error,
    }
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    app.router.redirect_slashes = False  # to where the caller's Host points
    return app if hosts is None else OnlyNamed(app, hosts)


def serve(engine, *, name, host="127.0.0.1", port=8000, allowed_hosts=()):
    """Serve an Engine's model until the process is told to end, by SIGINT or SIGTERM; allowed_hosts: as of ``names_of``."""
    hosts = names_of(host, allowed_hosts)
    Server(engine, name, hosts=hosts, host=host, port=port, log_level="info", access_log=False).run()


class Server(uvicorn.Server):
    """uvicorn with an Engine's model; options: of its Config. Texts have ``grace_s`` seconds once it is told to end."""

    def __init__(self, engine, name, *, grace_s=GRACE_S, hosts=None, **options):
        app = create_app(engine, name, hosts=hosts)
        # uvicorn's own limit cuts off in silence, and comes after ours
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=grace_s + 10, **options))
        self.engine = engine
        self.grace_s = grace_s

    async def shutdown(self, sockets=None):
        """End in order."""

        async def close_engine():
            await asyncio.sleep(self.grace_s)
            await run_in_threadpool(self.engine.close)
            await asyncio.sleep(LAST_WORDS_S)
            for connection in list(self.server_state.connections):  # of clients that do not read
                connection.transport.abort()

        closing = asyncio.create_task(close_engine())
        try:
            await super().shutdown(sockets)
        finally:
            closing.cancel()


def _http_error(_, error):
    wrong = RequestError(error.status_code, str(error.detail), kind="invalid_request_error")
    return JSONResponse(wrong.body, error.status_code, headers=error.headers)


def _server_error(_, error):
    wrong = RequestError(500, f"the server has failed: {type(error).__name__}", kind="server_error")
    return JSONResponse(wrong.body, 500)


class Service:
    """The endpoints. See ``create_app``."""

    def __init__(self, engine, name, max_body_bytes):
        self.engine = engine
        self.name = name
        self.max_body_bytes = max_body_bytes
        self.created = int(time.time())

    # ---- endpoints -----------------------------------------------------------------------------------------------------------

    async def health(self, _):
        """Whether requests are taken, and how many there are."""
        running, waiting = self.engine.counts
        if self.engine.failed:
            return JSONResponse({"status": "failed", "running": running, "waiting": waiting}, 503)
        return JSONResponse({"status": "ok", "running": running, "waiting": waiting})

    async def models(self, _):
        """The list of one model."""
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def model(self, request):
        """The one model."""
        self._check_model(request.path_params["model"])
        return JSONResponse(self._described())

    async def completions(self, request):
        """The continuations of prompts."""
        body = await self._read(request)
        prompts = _prompts(_wanted(body, "prompt"))
        if "messages" in body or "max_completion_tokens" in body:
            raise RequestError(400, "messages: belong to /v1/chat/completions", param="messages")
        return await self._answer(request, body, prompts, _Completion)

    async def chat(self, request):
        """The answer to a conversation."""
        body = await self._read(request)
        if "prompt" in body:
            raise RequestError(400, "prompt: belongs to /v1/completions", param="prompt")
        return await self._answer(request, body, [_messages(_wanted(body, "messages"))], _Chat)

    # ---- from a call to Requests ---------------------------------------------------------------------------------------------

    def _described(self):
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "nbkernels"}

    def _check_model(self, name):
        if name != self.name:
            message = f"model: {name!r} does not exist, {self.name!r} does"
            raise RequestError(404, message, param="model", code="model_not_found")

    async def _read(self, request):
        """The body, a JSON object whose names are all known."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # a page in a browser may send anything else to loopback without being asked
        if kind != "application/json":
            raise RequestError(415, f"Content-Type: {kind!r}, wanted 'application/json'")
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for piece in request.stream():
                    data += piece
                    if len(data) > self.max_body_bytes:
                        message = f"a body of more than {self.max_body_bytes} bytes"
                        raise RequestError(413, message, code="request_too_large")
        except TimeoutError:
            message = f"a body that took more than {BODY_S} seconds"
            raise RequestError(408, message, code="request_timeout", headers={"connection": "close"}) from None
        except ClientDisconnect:
            raise ClientLeft from None
        try:
            body = json.loads(data)
            json.dumps(body, ensure_ascii=False).encode()  # half a surrogate pair is no text that anybody could take
        except (ValueError, RecursionError) as error:
            raise RequestError(400, f"the body is no JSON: {error}", code="invalid_json") from None
        if not isinstance(body, dict):
            raise RequestError(400, f"the body is a JSON {type(body).__name__}, wanted an object", code="invalid_json")
        body = {key: value for key, value in body.items() if value is not None}
        for key, value in body.items():
            if key not in KNOWN:
                raise RequestError(400, f"{key}: not known here", param=key, code="unknown_parameter")
            if key in NOT_HAD and not any(_same(value, nothing) for nothing in NOT_HAD[key]):
                raise RequestError(400, f"{key}: {value!r} is not supported", param=key, code="unsupported_value")
        self._check_model(_of_type(body, "model", str, "a string", wanted=True))
        return body

    def _options(self, body, default_tokens):
        """What ``Engine.submit`` takes; default_tokens: of max_tokens, None for the rest of the context."""
        options = {name: body[name] for name in SAMPLING if name in body}
        options.setdefault("temperature", 1.0)
        for name in ("max_tokens", "max_completion_tokens"):
            tokens = _of_type(body, name, int, "an integer")
            if tokens is not None:
                if tokens < 1:
                    raise RequestError(400, f"{name}: {tokens}, wanted at least 1", param=name)
                default_tokens = tokens
        options["max_new_tokens"] = default_tokens
        if type(options.get("seed")) is int and -(2**63) <= options["seed"] < 0:  # OpenAI's are signed
            options["seed"] += 2**64
        stop = body.get("stop", [])
        options["stop"] = [stop] if isinstance(stop, str) else stop
        right = isinstance(options["stop"], list) and len(options["stop"]) <= MOST_STOPS
        if not right or any(isinstance(text, str) and len(text) > MOST_STOP_CHARACTERS for text in options["stop"]):
            message = (
                f"stop: wanted a string of at most {MOST_STOP_CHARACTERS} characters, or up to {MOST_STOPS} of them"
            )
            raise RequestError(400, message, param="stop")
        options["speculate"] = body.get("speculate", 0)
        return options

    def _submit(self, prompts, options, source):
        """A Request a prompt, or RequestError and none; source: what the body calls the prompts."""
        engine, made = self.engine, []
        try:
            for prompt in prompts:
                ids = engine.model.encode(prompt)
                room = max(1, min(engine.context, engine.cache.pages * engine.cache.page_size) - len(ids))
                tokens = room if options["max_new_tokens"] is None else min(options["max_new_tokens"], room)
                made.append(engine.submit(ids, **{**options, "max_new_tokens": tokens}))
        except BaseException as error:
            for request in made:
                request.cancel()
            if isinstance(error, QueueFull):
                raise RequestError(
                    429, f"{error}; try again later", code="queue_full", kind="rate_limit_error"
                ) from None
            if isinstance(error, ValueError | TypeError):
                param, message = _param_of(error), str(error)
                code = (
                    "context_length_exceeded" if param == "prompt" and "wanted at most" in message else "invalid_value"
                )
                if param == "prompt":
                    param, message = source, source + message.removeprefix(param)
                raise RequestError(400, message, param=param, code=code) from None
            if isinstance(error, RuntimeError):
                if engine.failed:
                    raise RequestError(503, str(error), code="unavailable", kind="server_error") from None
                raise shutting_down() from None
            raise
        return made

    async def _answer(self, request, body, prompts, form):
        stream = _of_type(body, "stream", bool, "true or false") or False
        include_usage = _include_usage(body, stream)
        options = self._options(body, COMPLETION_TOKENS if form is _Completion else None)
        # a long text takes a while to cut into tokens
        requests = await run_in_threadpool(self._submit, prompts, options, form.source)
        answer = form(self.name, requests)
        if stream:
            return _EventStream(self.engine, answer, include_usage)
        try:
            await _unless_gone(request.receive, _all_pieces(self.engine, requests))
        except ClientLeft:
            raise
        except Exception as error:
            raise _incomplete(error) from None
        finally:
            for one in requests:
                one.cancel()
        return JSONResponse(answer.whole())


async def _all_pieces(engine, requests):
    """Wait until all texts are complete."""

    async def one(request):
        async for _ in engine.pieces(request):
            pass
        _check_complete(request)

    await _together(map(one, requests))


def _check_complete(request):
    # a client that leaves ends what waits for its requests: the Engine was closed
    if request.finish_reason == "cancelled":
        raise shutting_down()


def _incomplete(error):
    """The RequestError of texts that an error has ended; what is no fault of the caller's goes to the log."""
    if isinstance(error, RequestError):
        return error
    LOG.error("a text could not be completed", exc_info=error)
    return RequestError(500, f"the text could not be completed: {error}", kind="server_error")


async def _together(works):
    """Await all; where one fails the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        await _cancel(tasks)


async def _cancel(tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _unless_gone(receive, work):
    """Await ``work``, or cancel it and raise ClientLeft when the client has closed the connection."""

    async def gone():
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientLeft
        return tasks[0].result()
    finally:
        await _cancel(tasks)


class _EventStream(Response):
    """The pieces of an answer as server-sent events, each as soon as it is there."""

    media_type = "text/event-stream"

    def __init__(self, engine, answer, include_usage):
        self.engine = engine
        self.answer = answer
        self.include_usage = include_usage
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-cache"})
        del self.headers["content-length"]

    async def __call__(self, scope, receive, send):
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _unless_gone(receive, self._write(send))
        except (ClientLeft, OSError):
            return
        finally:
            for request in self.answer.requests:
                request.cancel()

    async def _write(self, send):
        async def event(data):
            text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
            await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})

        async def one(index, request):
            for first in self.answer.first(index):
                await event(self._chunk([first]))
            async for piece in self.engine.pieces(request):
                await event(self._chunk([self.answer.piece(index, piece)]))
            _check_complete(request)
            await event(self._chunk([self.answer.last(index, request)]))

        try:
            await _together(one(i, r) for i, r in enumerate(self.answer.requests))
            if self.include_usage:
                await event({**self._chunk([]), "usage": self.answer.usage()})
            await event("[DONE]")
        except Exception as error:
            await event(_incomplete(error).body)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _chunk(self, choices):
        return {**self.answer.head(stream=True), "choices": choices, **({"usage": None} if self.include_usage else {})}


# ---- the shapes of answers ---------------------------------------------------------------------------------------------------


class _Completion:
    """An answer of /v1/completions: a choice a Request."""

    prefix, object, chunk_object, source = "cmpl", "text_completion", "text_completion", "prompt"

    def __init__(self, model, requests):
        self.model = model
        self.requests = requests
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def head(self, stream=False):
        """What every answer and every chunk begins with."""
        kind = self.chunk_object if stream else self.object
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def whole(self):
        """The complete answer."""
        choices = [self.complete(i, request) for i, request in enumerate(self.requests)]
        return {**self.head(), "choices": choices, "usage": self.usage()}

    def usage(self):
        """Tokens that were read and written."""
        read = sum(len(request.prompt) for request in self.requests)
        written = sum(len(request.ids) for request in self.requests)
        reused = sum(request.statistics.reused_tokens for request in self.requests)
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": reused},
        }

    def complete(self, index, request):
        """The choice of a Request that is done."""
        reason = FINISH_REASONS[request.finish_reason]
        return {"index": index, "text": request.text, "logprobs": None, "finish_reason": reason}

    def first(self, index):
        """Choices of chunks before any text."""
        return ()

    def piece(self, index, text):
        """The choice of a chunk with a piece of text."""
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def last(self, index, request):
        """The choice of the chunk behind a text."""
        return {"index": index, "text": "", "logprobs": None, "finish_reason": FINISH_REASONS[request.finish_reason]}


class _Chat(_Completion):
    """An answer of /v1/chat/completions."""

    prefix, object, chunk_object, source = "chatcmpl", "chat.completion", "chat.completion.chunk", "messages"

    def complete(self, index, request):
        message = {"role": "assistant", "content": request.text, "refusal": None}
        reason = FINISH_REASONS[request.finish_reason]
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}

    def first(self, index):
        return (self._delta(index, {"role": "assistant", "content": ""}),)

    def piece(self, index, text):
        return self._delta(index, {"content": text})

    def last(self, index, request):
        return self._delta(index, {}, FINISH_REASONS[request.finish_reason])

    @staticmethod
    def _delta(index, delta, reason=None):
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


# ---- checks ------------------------------------------------------------------------------------------------------------------


def _wanted(body, name):
    if name not in body:
        raise RequestError(400, f"{name}: missing", param=name, code="missing_required_parameter")
    return body[name]


def _of_type(body, name, kind, wanted_kind, wanted=False):
    """A value of the body, or None where there is none. RequestError for one of another type."""
    value = _wanted(body, name) if wanted else body.get(name)
    if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise RequestError(
            400, f"{name}: {type(value).__name__}, wanted {wanted_kind}", param=name, code="invalid_type"
        )
    return value


def _include_usage(body, stream):
    options = _of_type(body, "stream_options", dict, "an object") or {}
    options = {key: value for key, value in options.items() if value is not None}
    if options and not stream:
        raise RequestError(400, "stream_options: wanted with stream only", param="stream_options")
    unknown = options.keys() - {"include_usage", "include_obfuscation"}
    if unknown or not isinstance(options.get("include_usage", False), bool):
        raise RequestError(400, "stream_options: wanted {'include_usage': true or false}", param="stream_options")
    return options.get("include_usage", False)


def _prompts(prompt):
    """A list of strings or of lists of ids, of the four forms that a prompt may have."""

    def is_ids(value):
        return isinstance(value, list) and value and all(type(i) is int for i in value)

    if isinstance(prompt, str) or is_ids(prompt):
        return [prompt]
    several = isinstance(prompt, list) and prompt
    if not several or not (all(isinstance(p, str) for p in prompt) or all(is_ids(p) for p in prompt)):
        raise RequestError(400, "prompt: wanted a string, token ids, or a list of either", param="prompt")
    if len(prompt) > MOST_PROMPTS:
        raise RequestError(400, f"prompt: {len(prompt)} of them, wanted at most {MOST_PROMPTS}", param="prompt")
    return prompt


def _messages(messages):
    """Messages whose content is a string. What else may be wrong with them ``encode_chat`` says."""
    if not isinstance(messages, list) or not messages:
        raise RequestError(400, "messages: wanted a list of at least one message", param="messages")
    result = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise RequestError(400, f"messages[{i}]: wanted an object", param="messages")
        for key, value in message.items():
            if value and key not in ("role", "content") and key not in IGNORED_OF_MESSAGES:
                raise RequestError(400, f"messages[{i}]: {key!r} is not supported", param="messages")
        content = message.get("content")
        if isinstance(content, list):
            texts = [
                part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
            ]
            if not all(isinstance(text, str) for text in texts):
                raise RequestError(400, f"messages[{i}]: only parts of type 'text' are supported", param="messages")
            content = "".join(texts)
        role = "system" if message.get("role") == "developer" else message.get("role")
        result.append({"role": role, "content": content})
    return result


def _param_of(error):
    """The argument that a ValueError or TypeError names, or None."""
    name = str(error).partition(":")[0].partition("[")[0]
    name = {"max_new_tokens": "max_tokens"}.get(name, name)
    return name if name.isidentifier() else None


def _same(value, other):
    """Equality that tells False from 0."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
