"""``nbkernels serve`` against loopback, through the official client and through bare HTTP: answers, status codes, no leak."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import tiny_model

import nbkernels as nbk
from nbkernels.model.engine import Engine

pytest.importorskip("gguf")
openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from nbkernels import server  # noqa: E402
from nbkernels.server import MAX_BODY_BYTES, MOST_SHOWN, Server  # noqa: E402

SMALL = {"page_size": 16, "prefill_tokens": 16, "pages": 40, "max_batch": 8}


class Served:
    """A tiny model behind uvicorn in a thread, and clients for it. Once ended, texts have ``grace_s`` seconds."""

    def __init__(self, model, grace_s=10, **settings):
        self.engine = Engine(model, **{**SMALL, **settings})
        self.model = model
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        hosts = server.names_of("127.0.0.1", ("models.example.org",))
        self.server = Server(self.engine, "tiny", grace_s=grace_s, hosts=hosts, log_level="error")
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listening]}, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def close(self):
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive() and self.engine.cache.pages_in_use == 0

    def settled(self):
        """Whether, within some seconds, nobody is served and all pages are back but those kept for prompts that begin alike."""
        for _ in range(500):
            engine = self.engine
            if (
                not engine.busy
                and engine.prefixes.evictable_pages == engine.prefixes.pages == engine.cache.pages_in_use
            ):
                return True
            time.sleep(0.02)
        return False


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return nbk.load(tiny_model.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf"), device="cpu")


@pytest.fixture(scope="module")
def served(model):
    made = Served(model)
    yield made
    made.close()


@pytest.fixture
def client(served):
    yield served.client
    assert served.settled()


def test_models(client):
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "nbkernels"
    with pytest.raises(openai.NotFoundError, match="other"):
        client.models.retrieve("other")


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:80", "LOCALHOST", "Models.example.org"])
def test_names_it_answers_to(served, host):
    assert served.http.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example:8000", "127.0.0.1.evil.example", "localhost@evil.example", "[::1", ""])
def test_names_it_does_not_answer_to(served, host):
    body = {"model": "tiny", "prompt": "the fox", "max_tokens": 1}
    answer = served.http.post("/v1/completions", json=body, headers={"Host": host})
    assert answer.status_code == 421 and "--allow-host" in answer.json()["error"]["message"]


def test_whom_it_answers_where_it_listens():
    assert server.names_of("127.0.0.2") == {"127.0.0.1", "localhost", "::1", "127.0.0.2"}
    assert server.names_of("0.0.0.0") is None and server.names_of("gpu-box") is None
    assert server.names_of("0.0.0.0", ["gpu-box"]) == {"127.0.0.1", "localhost", "::1", "0.0.0.0", "gpu-box"}


def test_a_completion(served, client):
    options = {"max_tokens": 12, "temperature": 0.7, "top_p": 0.9, "seed": 4}
    answer = client.completions.create(model="tiny", prompt="the fox", **options)
    want = served.model.generate("the fox", max_new_tokens=12, temperature=0.7, top_p=0.9, seed=4)
    assert answer.choices[0].text == want and answer.object == "text_completion"
    assert answer.usage.prompt_tokens == len(served.model.encode("the fox"))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    several = client.completions.create(model="tiny", prompt=["the fox", "a"], **options)
    assert [choice.index for choice in several.choices] == [0, 1] and several.choices[0].text == want
    ids = served.model.encode("the fox")
    assert client.completions.create(model="tiny", prompt=ids, **options).choices[0].text == want


def test_a_streamed_completion_with_usage(client):
    options = {"model": "tiny", "prompt": ["the", "zz"], "max_tokens": 9, "temperature": 0}
    whole = client.completions.create(**options)
    texts, reasons, usage = ["", ""], [None, None], None
    for chunk in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        usage = chunk.usage or usage
    assert texts == [c.text for c in whole.choices] and reasons == [c.finish_reason for c in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_chat(served, client):
    messages = [{"role": "system", "content": "zz"}, {"role": "user", "content": "the fox"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=8, temperature=0)
    want = served.model.generate(messages, max_new_tokens=8)
    assert answer.choices[0].message.content == want and answer.choices[0].message.role == "assistant"
    parts = [
        messages[0],
        {"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "fox"}]},
    ]
    parts[1] |= {"name": "ann", "tool_calls": None, "annotations": []}  # as clients send back what they were sent
    stream = client.chat.completions.create(model="tiny", messages=parts, max_tokens=8, temperature=0, stream=True)
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == want
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_options_of_null_are_those_left_out(client):
    stream = client.completions.create(
        model="tiny",
        prompt="a",
        max_tokens=2,
        stream=True,
        stream_options={"include_usage": None},
        seed=None,
        stop=None,
    )
    assert all(chunk.usage is None for chunk in stream)


def test_a_stop_string(served, client):
    plain = client.completions.create(model="tiny", prompt="the", max_tokens=12, temperature=0).choices[0].text
    stopped = client.completions.create(model="tiny", prompt="the", max_tokens=12, temperature=0, stop=plain[4:6])
    assert stopped.choices[0].finish_reason == "stop" and stopped.choices[0].text == plain[: plain.index(plain[4:6])]


def test_sixty_four_at_once(served, client):
    async def main():
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as many:

            async def ask(number):
                options = {"model": "tiny", "prompt": f"fox {number}", "max_tokens": 10, "seed": number}
                if number % 2:
                    return (await many.completions.create(**options)).choices[0].text
                stream = await many.completions.create(**options, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(ask, range(64)))

    texts = asyncio.run(main())
    generate = served.model.generate
    assert texts == [generate(f"fox {i}", max_new_tokens=10, temperature=1.0, seed=i) for i in range(64)]


def test_clients_that_leave(served, client, monkeypatch):
    """Mid-stream, and while a whole answer is awaited: their requests end early, and nothing stays."""
    slow_down(monkeypatch, served, 0.02)
    options = {"model": "tiny", "prompt": "the quick", "max_tokens": 50, "temperature": 2.0, "seed": 8}
    served.engine.submit("the quick", max_new_tokens=50, temperature=2.0, seed=8).result()
    finished = []
    finish = served.engine._finish
    monkeypatch.setattr(
        served.engine, "_finish", lambda request, reason: (finished.append(reason), finish(request, reason))
    )
    for _ in range(3):
        stream = client.completions.create(**options, stream=True)
        next(iter(stream))
        stream.close()
    with pytest.raises(httpx.ReadTimeout):
        served.http.post("/v1/completions", json=options, timeout=0.1)
    assert served.settled()
    assert finished == ["cancelled"] * 4


@pytest.mark.parametrize(
    "body, status, text",
    [
        (b"{", 400, "no JSON"),
        (b"[1]", 400, "wanted an object"),
        (b"[" * 100_000, 400, "no JSON"),
        (b"\xff\xfe\x00", 400, "no JSON"),
        ({}, 400, "model: missing"),
        ({"model": 3}, 400, "model: int"),
        ({"model": "gpt-4", "prompt": "a"}, 404, "gpt-4"),
        ({"model": "tiny"}, 400, "prompt: missing"),
        ({"model": "tiny", "prompt": ""}, 400, "prompt: an empty string"),
        ({"model": "tiny", "prompt": []}, 400, "prompt: wanted"),
        ({"model": "tiny", "prompt": [1, "a"]}, 400, "prompt: wanted"),
        ({"model": "tiny", "prompt": ["a"] * 65}, 400, "prompt: 65"),
        ({"model": "tiny", "prompt": [10**6]}, 400, "vocabulary"),
        ({"model": "tiny", "prompt": "a" * 64}, 400, "prompt: 64 tokens"),
        ({"model": "tiny", "prompt": "a", "max_tokens": 0}, 400, "max_tokens: 0"),
        ({"model": "tiny", "prompt": "a", "max_tokens": "9"}, 400, "max_tokens: str"),
        ({"model": "tiny", "prompt": "a", "temperature": -1}, 400, "temperature: -1"),
        ({"model": "tiny", "prompt": "a", "top_p": 2}, 400, "top_p: 2"),
        ({"model": "tiny", "prompt": "a", "seed": "x"}, 400, "seed"),
        ({"model": "tiny", "prompt": "a", "stop": ["a"] * 5}, 400, "stop"),
        ({"model": "tiny", "prompt": "a", "stop": [1]}, 400, "stop"),
        ({"model": "tiny", "prompt": "a", "stop": "a" * 257}, 400, "stop: wanted a string of at most 256"),
        ({"model": "tiny", "prompt": "a", "seed": -(2**63) - 1}, 400, "seed"),
        ({"model": "tiny", "prompt": "a", "temperature": float("nan")}, 400, "temperature: nan"),
        ({"model": "tiny", "prompt": "a", "temperature": 10**400}, 400, "temperature: 1000"),
        ({"model": "tiny", "prompt": "a", "repetition_penalty": 10**400}, 400, "repetition_penalty: 1000"),
        ({"model": "tiny", "prompt": "\0"}, 400, "prompt: no tokens"),
        ({"model": "tiny", "prompt": "a", "logprobs": 0}, 400, "logprobs: 0 is not supported"),
        ({"model": "tiny", "prompt": "a", "n": True}, 400, "n: True is not supported"),
        ({"model": "tiny", "prompt": "a\ud800"}, 400, "surrogates not allowed"),
        ({"model": "tiny", "prompt": "a", "\ud800": 1}, 400, "surrogates not allowed"),
        ({"model": "tiny", "prompt": "a", "x" * 10**5: 1}, 400, "x" * MOST_SHOWN),
        ({"model": "tiny", "prompt": "a", "n": 2}, 400, "n: 2 is not supported"),
        ({"model": "tiny", "prompt": "a", "logit_bias": {"1": 5}}, 400, "logit_bias"),
        ({"model": "tiny", "prompt": "a", "tempreature": 1}, 400, "tempreature: not known"),
        ({"model": "tiny", "prompt": "a", "stream": "yes"}, 400, "stream: str"),
        ({"model": "tiny", "prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"model": "tiny", "messages": []}, 400, "prompt: missing"),
    ],
    ids=str,
)
def test_wrong_calls(served, client, body, status, text):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = served.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == status and text in error["message"]
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert len(error["message"]) < MOST_SHOWN + 10


def test_a_chat_that_is_too_long(client):
    with pytest.raises(openai.BadRequestError, match=r"messages: \d+ tokens, wanted at most") as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "b" * 64}])
    assert caught.value.param == "messages" and caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="\0")
    assert caught.value.param == "prompt" and caught.value.code == "invalid_value", "none is not too many"


def test_seeds_are_signed(served, client):
    options = {"model": "tiny", "prompt": "the", "max_tokens": 9, "temperature": 2.0}
    texts = [client.completions.create(**options, seed=seed).choices[0].text for seed in (-1, 2**64 - 1, 1)]
    assert texts[0] == texts[1] == served.model.generate("the", max_new_tokens=9, temperature=2.0, seed=2**64 - 1)


@pytest.mark.parametrize(
    "messages, text",
    [
        ([], "messages: wanted"),
        ("hello", "messages: wanted"),
        ([3], "messages[0]: wanted an object"),
        ([{"role": "king", "content": "a"}], "messages[0]['role']"),
        ([{"role": "user"}], "messages[0]['content']"),
        ([{"role": "assistant", "content": "a", "tool_calls": [{}]}], "messages[0]: 'tool_calls' is not supported"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0]: only parts of type 'text'"),
    ],
)
def test_wrong_messages(client, messages, text):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=messages)
    assert text in caught.value.body["message"]


def test_other_status_codes(served, client):
    http = served.http
    large = b'{"prompt": "' + b"a" * MAX_BODY_BYTES + b'"}'
    sent = http.post("/v1/completions", content=large, headers={"content-type": "application/json"})
    assert sent.status_code == 413 and sent.json()["error"]["code"] == "request_too_large"
    assert http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    assert http.get("/v1/completions").status_code == 405
    assert http.get("/v2").status_code == 404 and http.get("/v2").json()["error"]["message"]
    # no redirection to wherever the caller's Host points
    assert http.post("/v1/completions/", json={}).status_code == http.get("/health/").status_code == 404
    health = http.get("/health")
    assert health.status_code == 200 and health.json() == {"status": "ok", "running": 0, "waiting": 0}


def test_the_console_command(tmp_path):
    """A process of its own serves on loopback, and ends in order when it is told to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = tiny_model.write(tmp_path / "tiny.gguf")
    command = [sys.executable, "-m", "nbkernels.cli", "serve", str(path), "--device", "cpu", "--port", str(port)]
    process = subprocess.Popen([*command, "--max-prompt", "10", "--max-batch", "2"], stderr=subprocess.PIPE, text=True)
    try:
        while "running on" not in process.stderr.readline():
            assert process.poll() is None
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            assert client.completions.create(model="tiny.gguf", prompt="the", max_tokens=3, seed=1).choices[0].text
            with pytest.raises(openai.BadRequestError, match="11 tokens, wanted at most 10"):
                client.completions.create(model="tiny.gguf", prompt="b" * 11)
        again = subprocess.run([*command], capture_output=True, text=True, timeout=60)
        assert again.returncode == 2 and "Address already in use" in again.stderr and "Traceback" not in again.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(20) in (0, 130)
    finally:
        process.kill()
        process.stderr.close()


def slow_down(monkeypatch, served, seconds):
    launch = served.engine._runner.launch
    monkeypatch.setattr(served.engine._runner, "launch", lambda rows: (time.sleep(seconds), launch(rows)))


LONG = {"model": "tiny", "prompt": "the quick", "max_tokens": 50, "temperature": 2.0, "seed": 8}


def test_texts_are_completed_when_the_server_ends(model, monkeypatch):
    served = Served(model)
    slow_down(monkeypatch, served, 0.02)
    stream = served.client.completions.create(**LONG, stream=True)
    texts = [next(iter(stream)).choices[0].text]
    served.server.should_exit = True
    texts += [chunk.choices[0].text for chunk in stream]
    assert "".join(texts) == model.generate("the quick", max_new_tokens=50, temperature=2.0, seed=8)
    served.close()
    with pytest.raises(openai.APIConnectionError):
        served.client.models.list()


def test_texts_that_the_end_of_the_server_cuts_off(model, monkeypatch):
    """A stream ends with an error, a whole answer is one, and both say why."""
    served = Served(model, grace_s=0.2)
    slow_down(monkeypatch, served, 0.1)
    whole = []

    def ask():
        with pytest.raises(openai.InternalServerError) as caught:
            served.client.completions.create(**LONG)
        whole.append(caught.value)

    asking = threading.Thread(target=ask)
    asking.start()
    stream = served.client.completions.create(**LONG, stream=True)
    assert next(iter(stream)).choices[0].text
    began = time.monotonic()
    served.server.should_exit = True
    with pytest.raises(openai.APIError, match="the server is shutting down") as caught:
        list(stream)
    asking.join(20)
    assert time.monotonic() - began < 5
    assert caught.value.code == whole[0].code == "shutting_down" and whole[0].status_code == 503
    served.close()


def test_a_call_that_comes_too_late(model):
    served = Served(model)
    served.engine.close()
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
            served.client.completions.create(model="tiny", prompt="the", stream=stream)
        assert caught.value.status_code == 503
    served.close()


def test_a_client_that_leaves_within_its_body(served, client):
    """Nothing was asked for yet, and nothing stays of it."""
    for body in (b'{"model": "tiny", ', b""):
        with socket.create_connection(served.url.removeprefix("http://").split(":")) as half:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            head += b"Content-Length: 999\r\n\r\n"
            half.sendall(head + body)
    assert client.completions.create(model="tiny", prompt="a", max_tokens=2).choices
    assert served.http.get("/health").json() == {"status": "ok", "running": 0, "waiting": 0}


@pytest.mark.parametrize("ending", [False, True], ids=["served", "ending"])
def test_a_body_that_drips(model, monkeypatch, caplog, ending):
    """It is not waited for without end, nor does it hold up the end of the server."""
    monkeypatch.setattr(server, "BODY_S", 0.4)
    served = Served(model, grace_s=0.1)
    with socket.create_connection(served.url.removeprefix("http://").split(":"), timeout=10) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        slow.sendall(b"Content-Length: 999\r\n\r\n{")
        began, answer = time.monotonic(), b""
        time.sleep(0.1)
        served.server.should_exit = ending
        slow.sendall(b" ")
        while piece := slow.recv(4096):
            answer += piece
    assert time.monotonic() - began < 5
    assert answer.startswith(b"HTTP/1.1 408") and b"request_timeout" in answer
    served.close()
    assert not caplog.records


def test_a_client_that_does_not_read_when_the_server_ends(model, monkeypatch, caplog):
    monkeypatch.setattr(server, "LAST_WORDS_S", 0.2)
    served = Served(model, grace_s=0.1)
    served.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    body = json.dumps({**LONG, "prompt": ["the quick"] * 64, "stream": True}).encode()  # far more than buffers hold
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", int(served.url.rpartition(":")[2])))
        deaf.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        deaf.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert deaf.recv(1)
        assert served.settled(), "its texts are written all the same"
        began = time.monotonic()
        served.close()
    assert time.monotonic() - began < 5 and not caplog.records


def test_many_clients_of_whom_half_leave(model, monkeypatch):
    served = Served(model)
    slow_down(monkeypatch, served, 0.005)
    body = json.dumps({**LONG, "stream": True}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    clients = [socket.create_connection(served.url.removeprefix("http://").split(":"), timeout=60) for _ in range(64)]
    for client in clients:
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    for i, client in enumerate(clients):
        if i % 2:
            if i % 4 == 1:
                assert client.recv(1)
            client.close()
    answers = []
    for client in clients[::2]:
        with client, client.makefile("rb") as answer:
            answers.append(answer.read())
    want = model.generate("the quick", max_new_tokens=50, temperature=2.0, seed=8)
    for answer in answers:
        events = [line[6:] for line in answer.splitlines() if line.startswith(b"data: ")]
        assert events.pop() == b"[DONE]"
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == want
    assert served.settled()
    served.close()


def test_a_full_queue(model, monkeypatch):
    served = Served(model, max_batch=1, max_queue=1)
    try:
        slow_down(monkeypatch, served, 0.05)
        first = served.engine.submit("the quick", max_new_tokens=50, temperature=2.0, seed=8)
        next(first)
        waiting = served.engine.submit("the", max_new_tokens=2)
        with pytest.raises(openai.RateLimitError, match="1 requests are waiting"):
            served.client.completions.create(model="tiny", prompt="a")
        first.cancel()
        assert waiting.result(20) == model.generate("the", max_new_tokens=2)
        assert served.client.completions.create(model="tiny", prompt="a", max_tokens=2).choices
        assert served.settled()
    finally:
        served.close()


def test_an_engine_that_fails(model, monkeypatch):
    served = Served(model)
    try:
        monkeypatch.setattr(served.engine._runner, "launch", lambda rows: 1 / 0)
        with pytest.raises(openai.InternalServerError, match="could not be completed"):
            served.client.completions.create(model="tiny", prompt="the", temperature=0)
        assert served.http.get("/health").status_code == 503
        with pytest.raises(openai.InternalServerError, match="stopped after an error"):
            served.client.completions.create(model="tiny", prompt="a")
    finally:
        served.close()
