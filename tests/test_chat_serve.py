"""The server: answers as each request alone would get them, slots that come free, errors in OpenAI's form."""

import asyncio
import itertools
import json
import os
import signal
import threading
import time

import pytest
import torch

pytest.importorskip("starlette")
from tinygpt.chat import serve as module
from tinygpt.chat.serve import (
    PAGE,
    BadRequest,
    Engine,
    Request,
    Slots,
    bind,
    make_app,
    read_request,
)
from tinygpt.chat.turns import Conversation
from tinygpt.finetune.template import chat_tokenizer, render
from tinygpt.generate.sample import decode_rows, seeded_rows
from tinygpt.measure.speed import host_reads
from tinygpt.model import GPT, GPTConfig
from tinygpt.support import UserError
from tinygpt.tokenizer import ByteTokenizer

TOK = chat_tokenizer(ByteTokenizer())
HI = [{"role": "user", "content": "Hi"}]
KINDS = {
    "gpt2": ("gpt2", {}),
    "qwen3": ("llama", {"n_kv_head": 2, "qk_norm": True, "tie_weights": True}),
    "modern": ("modern", {"ngram_rows": 64}),
}


def make_model(kind="llama", **kw):
    torch.manual_seed(0)
    sizes = dict(vocab_size=TOK.n_vocab, block_size=96, n_layer=2, n_head=4, n_embd=32)
    model = GPT(getattr(GPTConfig, kind)(**sizes | kw)).eval()
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.2)
    return model


def whole(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids]))[0][0, -1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_rows_of_any_lengths_is_that_of_each_row_alone(kind):
    "Its oracle: the model itself, over the whole text at once."
    name, kw = KINDS[kind]
    model = make_model(name, **kw)
    slots = Slots(model, 4)
    texts = {3: [5], 0: list(range(20, 60)), 2: [9, 8, 7, 9, 8, 7]}
    for slot, ids in texts.items():
        torch.testing.assert_close(slots.read(slot, ids), whole(model, ids), atol=1e-4, rtol=1e-4)
    for tokens in ([1, 2, 3], [70, 60, 50]):
        found = slots.step([0, 2, 3], [[token] for token in tokens])
        for scores, slot, token in zip(found, (0, 2, 3), tokens):
            texts[slot] = [*texts[slot], token]
            torch.testing.assert_close(scores, whole(model, texts[slot]), atol=1e-4, rtol=1e-4)
    assert slots.ids[0] == texts[0] and slots.ids[1] == []
    slots.step([2], [[4]])  # the others rest
    torch.testing.assert_close(slots.step([3], [[6]])[0], whole(model, [*texts[3], 6]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_reads_only_what_is_new(kind):
    name, kw = KINDS[kind]
    model, ran = make_model(name, **kw), []
    model.register_forward_pre_hook(lambda module, args: ran.append(args[0].numel()))
    slots = Slots(model, 2)
    for ids, new in (([1, 2, 3, 4], 4), ([1, 2, 3, 4, 5, 6], 2), ([1, 2, 9], 1), ([1, 2, 9], 1), ([7], 1)):
        ran.clear()
        scores = slots.read(0, ids)
        assert ran == [new]
        torch.testing.assert_close(scores, whole(model, ids), atol=1e-4, rtol=1e-4)


def asked(i, n=2):
    ids, _ = render(TOK, [{"role": "user", "content": "Why? " * (1 + i % 3)}], add_generation_prompt=True)
    how = dict(temperature=(0.0, 0.7, 1.2)[i % 3], top_p=(1.0, 0.9)[i % 2], top_k=(0, 50)[i % 2])
    return seeded_rows([ids], seed=i)[0], how


def drain(engine):
    for _ in range(1000):  # a request without an end must not hold up the tests
        if not engine.waiting and not engine.going:
            return
        engine.round()
    raise AssertionError("a request has not ended after 1000 rounds")


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_each_request_gets_what_it_would_get_alone(batch_size):
    model = make_model()
    engine, requests, texts = Engine(model, TOK, batch_size), [], {}
    for i in range(7):
        row, how = asked(i)
        request = Request(row, 6 + i, **how)
        request.put = lambda piece, finish, i=i: texts.setdefault(i, []).append((piece, finish))
        requests.append(request)
        engine.submit(request)
        engine.round()  # it comes while others are being answered
    drain(engine)
    for i, request in enumerate(requests):
        row, how = asked(i)
        list(decode_rows(model, [row], 6 + i, **how, ends=engine.ends))
        assert request.row.new == row.new and request.row.finish == row.finish
        assert "".join(piece for piece, _ in texts[i]) == request.row.text == TOK.decode(row.new)
        assert [finish for _, finish in texts[i]][-1] == row.finish
    assert sorted(engine.free) == list(range(batch_size)) and not engine.shown


def test_requests_with_the_same_settings_draw_together():
    "A round makes the host wait as often for six of them as for one, and once more for other settings."
    model = make_model()

    def reads(*temperatures):
        engine = Engine(model, TOK, batch_size=8)
        for i, temperature in enumerate(temperatures):
            engine.submit(Request(asked(i)[0], 9, temperature=temperature))
        engine.round()  # they enter, which costs each its own pass
        return host_reads(engine.round)

    alone = reads(0.8)
    assert reads(*[0.8] * 6) == alone > 0
    assert reads(*[0.8] * 3, *[0.7] * 3) > alone


def test_a_client_that_leaves_frees_its_slot_and_the_next_one_gets_it():
    engine = Engine(make_model(), TOK, batch_size=1)
    engine.ends = set()
    first, second = Request(asked(0)[0], 50), Request(asked(1)[0], 3)
    engine.submit(first), engine.submit(second)
    for _ in range(4):
        engine.round()
    first.cancelled = True
    drain(engine)
    assert len(first.row.new) == 4 and len(second.row.new) == 3 and engine.free == [0]
    gone = Request(asked(2)[0], 3, cancelled=True)
    engine.submit(gone)
    drain(engine)
    assert gone.row.new == []


def test_requests_wait_in_order_and_too_many_are_turned_away():
    engine = Engine(make_model(), TOK, batch_size=1, max_waiting=2)
    order, requests = [], [Request(asked(i)[0], 2) for i in range(3)]
    for i, request in enumerate(requests):
        request.put = lambda piece, finish, i=i: finish and order.append(i)
    assert [engine.submit(r) for r in requests] == [True, True, False]
    drain(engine)
    assert order == [0, 1]


def test_who_left_while_waiting_takes_no_place_in_the_line():
    engine = Engine(make_model(), TOK, batch_size=1, max_waiting=2)
    engine.ends = set()
    first, gone = Request(asked(0)[0], 50), [Request(asked(i)[0], 50) for i in (1, 2)]
    engine.submit(first)
    engine.round()
    assert all(engine.submit(r) for r in gone) and not engine.submit(Request(asked(3)[0], 2))
    for request in gone:
        request.cancelled = True
    engine.round()  # the first one goes on, so no slot is free
    last = Request(asked(3)[0], 2)
    assert first in engine.going and engine.submit(last)
    drain(engine)
    assert len(last.row.new) == 2 and all(r.row.new == [] for r in gone)


def test_an_error_ends_its_request_and_not_the_loop():
    model = make_model()
    engine, said = Engine(model, TOK, batch_size=2), []
    bad = Request(asked(0)[0], 4, temperature="warm")  # `check_sampling` would have refused it
    bad.put = lambda piece, finish: said.append(finish)
    good = Request(asked(1)[0], 4)
    engine.submit(bad), engine.submit(good)
    drain(engine)
    assert said[-1].startswith("error: ") and good.row.finish and len(engine.free) == 2


def test_a_request_that_cannot_be_told_ends_alone():
    "Its `put` fails, as a loop does that is closed already."
    engine, good = Engine(make_model(), TOK, batch_size=2), Request(asked(1)[0], 4)
    engine.submit(Request(asked(0)[0], 4, put=lambda piece, finish: 1 / 0))
    engine.submit(good)
    drain(engine)
    assert good.row.finish and len(engine.free) == 2


@pytest.mark.parametrize("batch_size", [10**15, 10**23])
def test_more_contexts_than_the_memory_holds_are_one_sentence(batch_size):
    with pytest.raises(
        UserError, match=f"batch_size = {batch_size}: there is no memory .*: choose a smaller one"
    ):
        Engine(make_model(), TOK, batch_size)


def test_a_stop_string_ends_the_answer_and_stays_out_of_it():
    model = make_model()
    free = "".join(Conversation(model, TOK, temperature=0, max_new_tokens=20).ask("Hi"))
    stop = free[3:5]
    request = read_request({"messages": HI, "temperature": 0, "stop": stop, "max_tokens": 20}, TOK, 96)
    engine = Engine(model, TOK)
    engine.submit(request)
    drain(engine)
    assert request.row.text == free[: free.index(stop)] and request.row.finish == "stop"


def test_what_is_asked_for_becomes_a_request():
    body = {"messages": HI, "temperature": 0.5, "top_p": 0.7, "top_k": 9, "max_completion_tokens": 11}
    body |= {"seed": 4, "stop": ["a", "b"], "user": "ignored", "n": 1, "tools": [], "logprobs": False}
    request = read_request(body, TOK, 96)
    assert (request.temperature, request.top_p, request.top_k) == (0.5, 0.7, 9)
    assert request.max_new_tokens == 11 and request.stop == ["a", "b"]
    assert request.row.generator.initial_seed() == 4
    assert request.row.prompt == render(TOK, HI, add_generation_prompt=True)[0]
    parts = [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]
    assert read_request({"messages": parts}, TOK, 96).row.prompt == request.row.prompt
    both = [[{"role": role, "content": "Be brief."}, *HI] for role in ("system", "developer")]  # its new name
    old, new = (read_request({"messages": messages}, TOK, 96).row.prompt for messages in both)
    assert old == new == render(TOK, both[0], add_generation_prompt=True)[0]
    plain = {"response_format": {"type": "text"}, "modalities": ["text"], "repetition_penalty": 1.0}
    assert read_request({"messages": HI} | plain, TOK, 96).row.prompt == request.row.prompt  # the defaults
    assert read_request({"messages": HI, "max_tokens": 5000}, TOK, 96).max_new_tokens == 96 - len(
        request.row.prompt
    )


BAD = [
    ([], "not an object", None, 400),
    ({}, "one or more", "messages", 400),
    ({"messages": "Hi"}, "one or more", "messages", 400),
    ({"messages": ["Hi"]}, "has no role", "messages", 400),
    ({"messages": [{"content": "Hi"}]}, "message 1 has no role", "messages", 400),
    ({"messages": [{"role": "bot", "content": "Hi"}]}, "unknown role 'bot'", "messages", 400),
    ({"messages": [{"role": "user"}]}, "no content", "messages", 400),
    ({"messages": [*HI, {"role": "assistant", "content": " "}]}, "empty answer", "messages", 400),
    ({"messages": [*HI, {"role": "system", "content": "x"}]}, "can only come first", "messages", 400),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text", "messages", 400),
    ({"messages": [{"role": "user", "content": "long " * 30}]}, "leaves 0 of 96", "messages", 400),
    ({"messages": HI, "temperature": "hot"}, "temperature = 'hot'", "temperature", 400),
    ({"messages": HI, "temperature": True}, "temperature = True", "temperature", 400),
    ({"messages": HI, "temperature": float("nan")}, "temperature = nan", "temperature", 400),
    ({"messages": HI, "top_p": 0}, "top_p = 0", "top_p", 400),
    ({"messages": HI, "max_tokens": 0}, "max_tokens = 0", "max_tokens", 400),
    ({"messages": HI, "seed": 2**70}, "seed =", "seed", 400),
    ({"messages": HI, "n": 3}, "n = 3", "n", 400),
    ({"messages": HI, "stop": ["a"] * 5}, "up to four", "stop", 400),
    ({"messages": HI, "stop": [""]}, "none of them empty", "stop", 400),
    ({"messages": HI, "stop": "a" * 1001}, "longer than 1000", "stop", 400),
    ({"messages": HI, "stream_options": "x"}, "stream_options: give an object", "stream_options", 400),
    ({"messages": HI, "frequency_penalty": 0.5}, "is not supported", "frequency_penalty", 400),
    ({"messages": HI, "response_format": {"type": "json_object"}}, "not supported", "response_format", 400),
    ({"messages": HI, "min_p\ud800": 1}, "is not supported", "'min_p\\ud800'", 400),
    ({"messages": HI, "repetition_penalty": 1.1}, "is not supported", "repetition_penalty", 400),
    ({"messages": HI, "stream": "yes"}, "stream: give true or false", "stream", 400),
    ({"messages": HI, "tools": [{}]}, "tools is not supported", "tools", 400),
    ({"messages": HI, "logprobs": True}, "logprobs is not supported", "logprobs", 400),
    ({"messages": HI, "model": "gpt-9"}, "this server has tiny", "model", 404),
]


@pytest.mark.parametrize("body, told, param, status", BAD, ids=lambda x: str(x)[:30])
def test_a_bad_request_is_one_sentence_in_openais_form(body, told, param, status):
    with pytest.raises(BadRequest) as caught:
        read_request(body, TOK, 96, ("tiny",))
    error = caught.value.body()["error"]
    assert told in error["message"] and "\n" not in error["message"]
    assert (error["param"], caught.value.status) == (param, status)
    assert error["type"] == "invalid_request_error" and set(error) == {"message", "type", "param", "code"}


def test_an_answer_may_always_have_a_quarter_of_the_context():
    long = [{"role": "user", "content": "x" * 70}]
    with pytest.raises(BadRequest) as caught:
        read_request({"messages": long}, TOK, 96)
    assert caught.value.code == "context_length_exceeded"
    assert read_request({"messages": long, "max_tokens": 3}, TOK, 96).max_new_tokens == 3


@pytest.fixture
def engine():
    engine = Engine(make_model(), TOK, batch_size=2).start()
    yield engine
    engine.close()


def client_of(engine, **how):
    httpx = pytest.importorskip("httpx")
    transport = httpx.ASGITransport(make_app(engine, "tiny", ("localhost",)))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", **how)


def call(engine, method, path, **how):
    async def run():
        async with client_of(engine) as client:
            return await asyncio.wait_for(client.request(method, path, **how), 60)  # else without an end

    return asyncio.run(run())


CHAT = "/v1/chat/completions"


def test_a_whole_answer_and_a_streamed_one_are_the_conversations(engine):
    body = {"messages": HI, "temperature": 0, "max_tokens": 9, "model": "tiny"}
    text = "".join(Conversation(engine.model, TOK, temperature=0, max_new_tokens=9).ask("Hi"))
    answer = call(engine, "POST", CHAT, json=body).json()
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": text}
    assert choice["finish_reason"] in ("stop", "length") and answer["object"] == "chat.completion"
    asked = len(render(TOK, HI, True)[0])
    assert answer["usage"]["prompt_tokens"] == asked
    assert answer["usage"]["total_tokens"] == asked + answer["usage"]["completion_tokens"]

    body |= {"stream": True, "stream_options": {"include_usage": True}}
    streamed = call(engine, "POST", CHAT, json=body)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    lines = streamed.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""] and all(line.startswith("data: ") for line in lines[:-1])
    events = [json.loads(line[6:]) for line in lines[:-2]]
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas[0]["role"] == "assistant" and "".join(d.get("content", "") for d in deltas) == text
    assert events[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert events[-1]["usage"] == answer["usage"] and events[-1]["choices"] == []
    assert len({event["id"] for event in events}) == 1


def test_the_events_of_an_answer_tell_one_time(engine, monkeypatch):
    "OpenAI's reference of the chunk object: each chunk has the same timestamp."
    clock = itertools.count(1000)
    monkeypatch.setattr(module.time, "time", lambda: next(clock))
    body = {"messages": HI, "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
    body["temperature"] = 0  # a drawn answer may be empty
    lines = call(engine, "POST", CHAT, json=body).text.split("\n\n")[:-2]
    assert len(lines) > 3 and len({json.loads(line[6:])["created"] for line in lines}) == 1


def test_many_clients_at_once_get_their_own_answers(engine):
    async def run():
        async with client_of(engine, timeout=60) as client:
            bodies = [{"messages": HI, "seed": i, "max_tokens": 8, "stream": i % 2 == 0} for i in range(6)]
            answers = asyncio.gather(*(client.post(CHAT, json=body) for body in bodies))
            return await asyncio.wait_for(answers, 60)

    for i, answer in enumerate(asyncio.run(run())):
        alone = "".join(Conversation(engine.model, TOK, seed=i, max_new_tokens=8).ask("Hi"))
        if i % 2:
            assert answer.json()["choices"][0]["message"]["content"] == alone
        else:
            events = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
            assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == alone


@pytest.mark.parametrize("stream", [True, False])
def test_the_work_ends_when_the_client_leaves(engine, stream):
    "An application server tells of it by http.disconnect."
    engine.ends = set()
    body = json.dumps({"messages": HI, "max_tokens": 80, "stream": stream}).encode()
    started, requests = [], []
    submit = engine.submit
    engine.submit = lambda request: requests.append(request) or submit(request)
    take, slow = engine._take, threading.Event()
    engine._take = lambda request: (slow.wait(0.02), take(request))

    async def run():
        asked = [{"type": "http.request", "body": body}]

        async def receive():
            if asked:
                return asked.pop()
            while not (requests and len(requests[0].row.new) > 3):
                await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        async def send(message):
            started.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = dict(type="http", method="POST", path=CHAT, headers=headers, query_string=b"")
        app = make_app(engine, "tiny", ("localhost",))
        await app(scope | {"asgi": {"version": "3.0", "spec_version": "2.3"}}, receive, send)

    asyncio.run(run())
    for _ in range(500):
        if not engine.going and len(engine.free) == 2:
            break
        time.sleep(0.01)
    assert requests[0].cancelled and 3 < len(requests[0].row.new) < 80 and len(engine.free) == 2


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_error_of_the_server(engine):
    messages = [{"type": "http.request", "body": b'{"mess', "more_body": True}, {"type": "http.disconnect"}]

    async def receive():
        return messages.pop(0)

    async def send(message):
        pass

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = dict(type="http", method="POST", path=CHAT, headers=headers, query_string=b"")
    scope |= {"asgi": {"version": "3.0", "spec_version": "2.3"}}
    asyncio.run(make_app(engine, "tiny", ("localhost",))(scope, receive, send))  # raised ClientDisconnect
    assert not engine.going and not engine.waiting


def test_a_body_that_never_comes_does_not_hold_up_the_end_of_the_server(engine):
    "The server library cancels what still runs; it raised CancelledError, which was printed with its stack."
    sent = []

    async def run():
        asked = asyncio.Event()

        async def receive():
            asked.set()
            await asyncio.Event().wait()

        async def send(message):
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = dict(type="http", method="POST", path=CHAT, headers=headers, query_string=b"")
        scope |= {"asgi": {"version": "3.0", "spec_version": "2.3"}}
        task = asyncio.create_task(make_app(engine, "tiny", ("localhost",))(scope, receive, send))
        await asyncio.wait_for(asked.wait(), 60)  # without an end, if the body is not read
        task.cancel()
        await task

    asyncio.run(run())
    assert sent[0]["status"] == 499


def test_closing_answers_everyone_who_waits(engine):
    engine.ends, step = set(), engine._step
    engine._step = lambda: (time.sleep(0.05), step())  # so that none of them ends before

    async def run():
        async with client_of(engine, timeout=60) as client:
            bodies = [{"messages": HI, "max_tokens": 80, "stream": i % 2 == 0} for i in range(4)]
            answers = asyncio.gather(*(client.post(CHAT, json=body) for body in bodies))
            for _ in range(6000):
                if len(engine.going) == len(engine.waiting) == 2:
                    break
                await asyncio.sleep(0.01)
            await asyncio.to_thread(engine.close)
            answers = await asyncio.wait_for(answers, 60)  # without an end, if they are not told
            return [*answers, await asyncio.wait_for(client.post(CHAT, json=bodies[1]), 60)]

    *answers, late = asyncio.run(run())
    assert [answer.status_code for answer in answers] == [200, 500, 200, 500] and late.status_code == 503
    assert all("the server has been closed" in answer.text for answer in answers)
    assert not any("[DONE]" in answer.text for answer in answers)
    assert not engine.thread.is_alive() and not engine.going and not engine.waiting


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send")
def test_ctrl_c_ends_long_answers_with_a_sentence_and_no_stack(monkeypatch, capsys):
    httpx, _ = pytest.importorskip("httpx"), pytest.importorskip("uvicorn")
    made, answers = [], []

    class Slow(Engine):
        def __init__(self, *given):
            super().__init__(*given)
            self.ends = set()
            made.append(self)

        def _step(self):
            time.sleep(0.3)  # 80 tokens would take 24 seconds
            super()._step()

    def ask(stream):
        body = {"messages": HI, "max_tokens": 80, "stream": stream}
        answers.append(httpx.post(f"http://127.0.0.1:{port}{CHAT}", json=body, timeout=60))

    def clients():
        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
        for thread in threads:
            thread.start()
        while not made:
            time.sleep(0.01)
        while all(thread.is_alive() for thread in threads) and len(made[0].going) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        for thread in threads:
            thread.join()

    monkeypatch.setattr(module, "Engine", Slow)
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        talking = threading.Thread(target=clients, daemon=True)
        talking.start()
        module.serve(make_model(), TOK, "tiny", listener)
        talking.join()
    assert sorted(answer.status_code for answer in answers) == [200, 500]
    assert all("the server has been closed" in answer.text for answer in answers)
    assert "Traceback" not in "".join(capsys.readouterr()) and not made[0].thread.is_alive()


@pytest.mark.parametrize(
    "how, status, told",
    [
        (dict(content=b"{", headers={"content-type": "application/json"}), 400, "not JSON"),
        (dict(content=b"[" * 100_000, headers={"content-type": "application/json"}), 400, "not JSON"),
        (dict(content=b"{}", headers={"content-type": "text/plain"}), 415, "application/json"),
        (dict(content=b"{}"), 415, "application/json"),
        (dict(json={"messages": "x" * 1_000_001}), 413, "1,000,000 bytes"),
        (dict(json={"messages": HI}, headers={"host": "evil.example"}), 403, "'evil.example'"),
        (dict(json={"messages": HI, "stream": True, "stream_options": [1]}), 400, "stream_options"),
        (dict(content=b'{"\\ud800": 1}', headers={"content-type": "application/json"}), 400, "not supported"),
        (dict(json={"messages": HI, "model": "other"}), 404, "this server has tiny"),
        (dict(json={"messages": [{"content": "Hi"}]}), 400, "has no role"),
    ],
)
def test_what_is_no_request_is_a_4xx_with_one_sentence(engine, how, status, told):
    answer = call(engine, "POST", CHAT, **how)
    assert answer.status_code == status and told in answer.json()["error"]["message"]
    assert not engine.going and not engine.waiting


def test_other_addresses_and_methods_have_the_form_too(engine):
    for method, path, status in (("GET", CHAT, 405), ("GET", "/v2", 404), ("POST", "/v1/models", 405)):
        answer = call(engine, method, path)
        assert answer.status_code == status and "/v1/models" in answer.json()["error"]["message"]
    for host in ("localhost:8000", "LOCALHOST"):
        assert call(engine, "GET", "/", headers={"host": host}).status_code == 200
    assert call(engine, "GET", "/", headers={"host": "[::1]:8000"}).status_code == 403


def test_too_many_who_wait_are_a_503(engine):
    engine.max_waiting = 0
    answer = call(engine, "POST", CHAT, json={"messages": HI})
    assert answer.status_code == 503 and "try again" in answer.json()["error"]["message"]


def test_more_requests_than_the_server_reads_at_once_are_a_503_in_the_same_form(engine, monkeypatch):
    monkeypatch.setattr(module, "MOST_REQUESTS", 3)
    headers = {"content-type": "application/json"}

    async def run():
        ending, body = asyncio.Event(), json.dumps({"messages": HI, "max_tokens": 2}).encode()

        async def slow():
            yield body[:9]
            await ending.wait()
            yield body[9:]

        async with client_of(engine) as client:
            slow_ones = [client.post(CHAT, content=slow(), headers=headers) for _ in range(3)]
            waiting = [asyncio.create_task(one) for one in slow_ones]
            for _ in range(1000):  # until all three are being read
                await asyncio.sleep(0)
                one_more = await client.get("/v1/models")
                if one_more.status_code != 200:
                    break
            ending.set()
            done = await asyncio.wait_for(asyncio.gather(*waiting), 60)
            return one_more, done, await client.get("/v1/models")

    one_more, done, after = asyncio.run(run())
    assert one_more.status_code == 503 and "try again" in one_more.json()["error"]["message"]
    assert [answer.status_code for answer in (*done, after)] == [200] * 4


def test_a_diverged_model_is_a_500_with_its_sentence(engine):
    with torch.no_grad():
        engine.model.lm_head.weight.fill_(float("nan"))
    answer = call(engine, "POST", CHAT, json={"messages": HI})
    assert answer.status_code == 500 and "not finite" in answer.json()["error"]["message"]
    streamed = call(engine, "POST", CHAT, json={"messages": HI, "stream": True})
    assert "not finite" in streamed.text and "[DONE]" not in streamed.text


def test_the_models_and_the_page(engine):
    models = call(engine, "GET", "/v1/models").json()
    assert [m["id"] for m in models["data"]] == ["tiny"] and models["object"] == "list"
    page = call(engine, "GET", "/")
    assert page.text == PAGE and "default-src 'none'" in page.headers["content-security-policy"]
    assert "http:" not in PAGE and "https:" not in PAGE and "//cdn" not in PAGE  # nothing from other hosts
    assert "innerHTML" not in PAGE and "document.write" not in PAGE  # text is put in as text


def test_openais_client_talks_to_it(engine):
    "Over a real socket, with a real server."
    openai, uvicorn = pytest.importorskip("openai"), pytest.importorskip("uvicorn")
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(make_app(engine, "tiny", ("127.0.0.1",)), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=2)
    try:
        assert [m.id for m in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.NotFoundError, match="model = 'big/one' is not here: this server has tiny"):
            client.models.retrieve("big/one")
        how = dict(model="tiny", messages=HI, temperature=0, max_tokens=9)
        text = client.chat.completions.create(**how).choices[0].message.content
        assert text == "".join(Conversation(engine.model, TOK, temperature=0, max_new_tokens=9).ask("Hi"))
        pieces = [
            event.choices[0].delta.content or ""
            for event in client.chat.completions.create(**how, stream=True)
        ]
        assert "".join(pieces) == text and len(pieces) > 2
        with pytest.raises(openai.BadRequestError, match="unknown role 'bot'"):
            client.chat.completions.create(model="tiny", messages=[{"role": "bot", "content": "x"}])
        with pytest.raises(openai.NotFoundError, match="this server has tiny"):
            client.chat.completions.create(model="other", messages=HI)
    finally:
        server.should_exit = True
        thread.join(10)
    assert not thread.is_alive()


def test_a_port_that_is_taken_is_one_sentence():
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(UserError, match="give another --host or --port"):
            bind("127.0.0.1", taken.getsockname()[1])
    with bind("127.0.0.1", 0) as first:  # it has not begun to serve yet
        with pytest.raises(UserError, match="give another --host or --port"):
            bind("127.0.0.1", first.getsockname()[1])
    for host in ("203.0.113.7", "é..b"):
        with pytest.raises(UserError, match="cannot listen"):
            bind(host, 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_on_its_own_machine_only_its_own_names_are_answered(monkeypatch, host):
    uvicorn = pytest.importorskip("uvicorn")
    made = []
    monkeypatch.setattr(module, "make_app", lambda *given: made.append(given))
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    try:
        listener = bind(host, 0)
    except UserError:
        pytest.skip(f"this machine has no {host}")
    with listener:
        module.serve(make_model(), TOK, "tiny", listener)
    [(_, _, hosts)] = made
    own = f"[{host}]" if ":" in host else host
    assert len(hosts) == len(set(hosts)) and set(hosts) == {"127.0.0.1", "localhost", "[::1]", own}


def test_serving_ends_the_engine_and_says_where_it_is(monkeypatch, capsys):
    uvicorn = pytest.importorskip("uvicorn")
    made, seen = [], []
    monkeypatch.setattr(module, "make_app", lambda *given: made.append(given))
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: seen.append(made[0][0].closed))
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        module.serve(make_model(), TOK, "tiny", listener, 3)
    engine, name, hosts = made[0]
    assert seen == [False] and engine.closed and len(engine.free) == 3
    assert (name, hosts) == ("tiny", ("127.0.0.1", "localhost", "[::1]"))
    assert f"http://127.0.0.1:{port}/" in capsys.readouterr().out
