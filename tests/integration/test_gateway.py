"""``sordino gateway`` by OpenAI's own client, and by raw HTTP where that client is too well-behaved."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import models
import openai
import pytest
from openai import OpenAI
from pairs import InProcessServer
from rich.console import Console
from stack import ServerProcess

from sordino.client import Connected, connect
from sordino.client.answers import Answers, Generation
from sordino.client.gateway import app, run
from sordino.client.gateway.app import Settings
from sordino.client.gateway.run import Server, bind
from sordino.client.proxy import RecordingProxy
from sordino.proto.v1 import sordino_pb2 as pb
from sordino.server.split import split_model
from sordino.shared.errors import RangeError

KEY = "sk-sordino-" + "k" * 43
MODEL = "tiny"
ASK: list[Any] = [{"role": "user", "content": "the quick brown fox"}]
WAIT_S = 60.0  # for what should come at once, on a machine under load
HERMES = (
    "{% if tools %}You may call:{% for t in tools %}\n{{ t | tojson }}{% endfor %}\nas <tool_call>{...}</tool_call>\n"
    "{% endif %}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function.name }} {{ c.function.arguments.town }}</tool_call>{% endfor %}\n{% endfor %}[assistant] "
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["Oslo", "Rome"]}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}


class Watched(Generation):
    """The real one, which a test can look at afterwards and hold before any piece after the first."""

    made: ClassVar[list[Watched]] = []
    go: ClassVar[threading.Event] = threading.Event()

    def run(self) -> Answers:
        Watched.made.append(self)
        tell, pieces = self.on_piece, iter(range(10_000))
        assert tell is not None

        def held(piece: Any) -> None:
            if next(pieces):
                assert Watched.go.wait(WAIT_S)
            tell(piece)

        self.on_piece = held
        return super().run()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Watched]]:
    Watched.made = []
    Watched.go = threading.Event()
    Watched.go.set()
    monkeypatch.setattr(app, "Generation", Watched)
    yield Watched
    Watched.go.set()


def until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Gateway:
    """A gateway in threads of this process, on a port of its own."""

    def __init__(self, link: Connected, **settings: Any) -> None:
        self.link, self._socket = link, bind("127.0.0.1", 0)
        self._socket.listen()
        self.port = self._socket.getsockname()[1]
        self.server = Server(link, Settings(model=MODEL, **settings), key=KEY, port=self.port)
        self._thread = threading.Thread(target=self.server.run, args=([self._socket],))
        self._thread.start()
        self.client = OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=KEY, max_retries=0, timeout=WAIT_S)
        self.chat, self.complete = self.client.chat.completions.create, self.client.completions.create

    def say(self, messages: list[Any] = ASK, **options: Any) -> Any:
        return self.chat(model=MODEL, messages=messages, **{"temperature": 0, "max_tokens": 8, **options})

    def stream(self, **options: Any) -> list[Any]:
        return list(self.say(stream=True, **options))

    def raw(
        self, method: str = "POST", path: str = "/v1/chat/completions", body: bytes | None = None, **headers: str | None
    ) -> tuple[int, dict[str, Any], http.client.HTTPMessage]:
        """A request with good headers but for ``headers``; None leaves one out."""
        good = {"host": f"127.0.0.1:{self.port}", "authorization": f"Bearer {KEY}", "content_type": "application/json"}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        with closing(connection):
            connection.putrequest(method, path, skip_host=True)
            for name, value in {**good, **headers}.items():
                if value is not None:
                    connection.putheader(name.replace("_", "-"), value)
            if body is not None:
                connection.putheader("content-length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            raw = answer.read()
            return answer.status, json.loads(raw) if raw.startswith(b"{") else {}, answer.headers

    def close(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self._socket.close()


@contextmanager
def linked(target: str, tmp: Path, how: dict[str, Any] | None = None, **settings: Any) -> Iterator[Gateway]:
    link = connect(target, cache=tmp / "cache", retry_s=0.2, timeout_s=WAIT_S, **(how or {"protocol": "clear"}))
    with closing(Gateway(link, **settings)) as served:
        yield served


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With room for what templates say of tools: a byte is a token."""
    folder = tmp_path_factory.mktemp("roomy")
    model = models.make_tiny("llama", folder / "model", max_position_embeddings=1024)
    split_model(model, folder / "bundle", rounding="nearest")
    return folder / "bundle"


@pytest.fixture(scope="module")
def target(bundle: Path) -> Iterator[str]:
    with closing(InProcessServer(bundle)) as server:
        yield f"grpc://127.0.0.1:{server.port}"


@pytest.fixture(scope="module")
def gateway(target: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with linked(target, tmp_path_factory.mktemp("gateway"), queue=1) as served:
        yield served


@pytest.fixture
def tools(gateway: Gateway) -> Iterator[Gateway]:
    """With a chat template that knows tools, as Hermes' and Qwen's do."""
    before = gateway.link.tokenizer.chat_template
    gateway.link.tokenizer.chat_template = HERMES
    yield gateway
    gateway.link.tokenizer.chat_template = before


# -- answers ---------------------------------------------------------------------------------------------------------


def test_models(gateway: Gateway) -> None:
    [model] = gateway.client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert gateway.client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        gateway.client.models.retrieve("gpt-4o")


def test_a_chat_is_what_transformers_makes_of_it(gateway: Gateway) -> None:
    tokenizer, model = gateway.link.tokenizer, gateway.link.model
    messages = [{"role": "system", "content": "Be brief."}, *ASK]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=24)[0, inputs["input_ids"].shape[1] :].tolist()
    answer = gateway.say(messages=messages, max_tokens=24)
    [choice] = answer.choices
    assert choice.message.content == tokenizer.decode(ids, skip_special_tokens=True)
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert answer.usage.prompt_tokens == inputs["input_ids"].shape[1]
    assert answer.usage.completion_tokens == len(ids) == 24
    # OpenAI's newer names for the same, and content in parts.
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": ASK[0]["content"]}]},
    ]
    again = gateway.chat(model=MODEL, messages=parts, temperature=0, max_completion_tokens=24)
    assert again.choices[0].message.content == choice.message.content


@pytest.mark.parametrize("options", [{}, {"stop": "\u0001"}, {"n": 3, "temperature": 1, "seed": 5}, {"logprobs": True}])
def test_a_stream_is_the_answer_in_pieces(gateway: Gateway, options: dict[str, Any]) -> None:
    """Cases 3.3 and 3.6: no chunk without anything in it, usage as counted, the same text."""
    whole = gateway.say(max_tokens=24, **options)
    *chunks, last = gateway.stream(max_tokens=24, stream_options={"include_usage": True}, **options)
    assert (last.choices, last.usage) == ([], whole.usage)
    assert whole.usage.completion_tokens == sum(len(row.tokens) for row in Watched.made[-1].answers().answers)
    for chunk in chunks:
        [choice] = chunk.choices
        assert chunk.usage is None
        assert choice.delta.content or choice.finish_reason
    for number, expected in enumerate(whole.choices):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == number]
        assert "".join(choice.delta.content or "" for choice in mine) == expected.message.content
        assert [choice.delta.role for choice in mine] == ["assistant", *[None] * (len(mine) - 1)]
        assert [choice.finish_reason for choice in mine] == [*[None] * (len(mine) - 1), expected.finish_reason]
        if options.get("logprobs"):
            told = [token for choice in mine for token in choice.logprobs.content]
            assert told == expected.logprobs.content
            assert len(told) == whole.usage.completion_tokens


def test_without_include_usage_a_stream_has_none(gateway: Gateway) -> None:
    assert all(len(chunk.choices) == 1 and "usage" not in chunk.model_fields_set for chunk in gateway.stream())


def test_logprobs(gateway: Gateway) -> None:
    chat = gateway.say(logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert [len(token.top_logprobs) for token in chat] == [3] * 8
    for token in chat:
        assert token.token == token.top_logprobs[0].token  # greedy takes the likeliest
        assert token.logprob == token.top_logprobs[0].logprob < 0
        assert token.bytes == (None if "�" in token.token else list(token.token.encode()))
    plain = gateway.complete(model=MODEL, prompt="the quick", max_tokens=8, temperature=0, logprobs=2).choices[0]
    offsets = plain.logprobs.text_offset
    assert len(plain.logprobs.tokens) == len(plain.logprobs.token_logprobs) == 8
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len(plain.text)
    assert all(len(top) <= 2 for top in plain.logprobs.top_logprobs)
    assert gateway.complete(model=MODEL, prompt="the quick", max_tokens=2).choices[0].logprobs is None


def test_completions_of_texts_and_tokens(gateway: Gateway) -> None:
    def texts(prompt: Any, **options: Any) -> list[str]:
        answer = gateway.complete(model=MODEL, prompt=prompt, **{"temperature": 0, "max_tokens": 6, **options})
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    ids = {text: gateway.link.tokenizer(text)["input_ids"] for text in ("the quick", "brown")}
    [alone], [other] = texts("the quick"), texts("brown")
    assert alone != other
    assert texts(["the quick"]) == texts(ids["the quick"]) == texts([ids["the quick"]]) == [alone]
    several = gateway.complete(model=MODEL, prompt=["the quick", "brown"], temperature=1, n=2, seed=3, max_tokens=6)
    assert len(several.choices) == 4
    assert several.usage.prompt_tokens == sum(len(row) for row in ids.values())
    assert several.usage.completion_tokens == 24
    streamed = gateway.complete(model=MODEL, prompt="brown", temperature=0, max_tokens=6, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == other
    assert gateway.complete(model=MODEL, prompt="brown").usage.completion_tokens <= 16  # as OpenAI defines it


def test_a_seed_fixes_the_answer(gateway: Gateway) -> None:
    first, same, other = (gateway.say(temperature=1, seed=seed).choices[0].message.content for seed in (7, 7, 8))
    assert first == same != other


@pytest.mark.parametrize(
    "options",
    [
        {"frequency_penalty": 2.0},
        {"presence_penalty": -2.0},
        {"logit_bias": {"70": 100}},
        {"extra_body": {"repetition_penalty": 3.0}},
        {"extra_body": {"bad_words": ["\u0001"]}},
        {"temperature": 1, "seed": 1, "top_p": 0.01},
        {"temperature": 1, "seed": 1, "extra_body": {"top_k": 1}},
        {"temperature": 1, "seed": 1, "extra_body": {"min_p": 0.999}},
        {"temperature": 5, "seed": 1},
    ],
)
def test_options_reach_the_sampler(gateway: Gateway, options: dict[str, Any]) -> None:
    """Each changes this answer, or makes of a drawn one the greedy one."""
    greedy = gateway.say(max_tokens=16).choices[0].message.content
    answer = gateway.say(**{"max_tokens": 16, **options}).choices[0].message.content
    narrow = options.get("temperature") == 1
    assert (answer == greedy) is narrow


def test_min_tokens_and_max_tokens(gateway: Gateway) -> None:
    first = gateway.say().choices[0].message.content[0]
    assert gateway.say(stop=first).usage.completion_tokens < 5
    assert gateway.say(stop=first, extra_body={"min_tokens": 5}).usage.completion_tokens >= 5
    assert gateway.say(max_tokens=3).usage.completion_tokens == 3


def test_speculation_and_constant_length(gateway: Gateway) -> None:
    plain = gateway.say(max_tokens=24)
    drafted = gateway.say(max_tokens=24, extra_body={"speculate": "ngram", "draft_tokens": 3, "fixed_drafts": True})
    assert drafted.choices[0].message.content == plain.choices[0].message.content
    details = drafted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0
    stop = plain.choices[0].message.content[0]
    constant = gateway.say(max_tokens=24, stop=stop, extra_body={"fixed_length": True, "pad_prompt": 64})
    assert constant.usage.completion_tokens < 5
    assert constant.choices[0].finish_reason == "stop"
    assert constant.usage.prompt_tokens == plain.usage.prompt_tokens


# -- stop (cases 3.2, 3.4, 3.5) --------------------------------------------------------------------------------------

SCRIPT: dict[str, Any] = {"guided_choice": ["DEFGHIJKL"]}  # what the model must say


@pytest.mark.parametrize(
    ("stop", "text", "finish"),
    [
        ("DEFGHIJ", "", "stop"),
        ("DEFGHX", "DEFGHIJKL", "stop"),
        (["KX", "GH"], "DEF", "stop"),
        ([], "DEFGHIJKL", "stop"),
        (None, "DEFGHIJKL", "stop"),
        ("x" * 1000, "DEFGHIJKL", "stop"),
    ],
)
def test_stop(gateway: Gateway, stop: Any, text: str, finish: str) -> None:
    said: dict[str, Any] = {"max_tokens": 32, "stop": stop, "extra_body": SCRIPT}
    whole = gateway.say(**said)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (text, finish)
    pieces = [chunk.choices[0].delta.content for chunk in gateway.stream(**said)]
    assert "".join(piece or "" for piece in pieces) == text


def test_each_answer_stops_by_itself(gateway: Gateway) -> None:
    said: dict[str, Any] = {"n": 4, "temperature": 1.5, "seed": 11, "max_tokens": 24}
    free = gateway.say(**said).choices
    stop = free[0].message.content[3]
    for one, without in zip(gateway.say(**said, stop=stop).choices, free, strict=True):
        assert one.message.content == without.message.content.partition(stop)[0]
        assert (one.finish_reason == "stop") is (stop in without.message.content)


# -- guides and tools ------------------------------------------------------------------------------------------------


def test_guides(gateway: Gateway) -> None:
    def content(**options: Any) -> str:
        choice = gateway.say(max_tokens=64, **options).choices[0]
        assert choice.finish_reason == "stop"
        return str(choice.message.content)

    town = WEATHER["function"]["parameters"]
    named = {"type": "json_schema", "json_schema": {"name": "town", "schema": town, "strict": True}}
    for options in ({"response_format": named}, {"extra_body": {"guided_json": town}}):
        assert json.loads(content(**options))["town"] in ("Oslo", "Rome")
    assert re.fullmatch("[ab]{4}", content(extra_body={"guided_regex": "[ab]{4}"}))
    assert content(extra_body={"guided_choice": ["yes", "no"]}) in ("yes", "no")
    assert content(extra_body={"guided_grammar": 'root ::= "x" "y"'}) == "xy"
    assert content(response_format={"type": "text"}, extra_body={"guided_choice": ["one"]}) == "one"
    cut = gateway.say(max_tokens=20, response_format={"type": "json_object"}).choices[0]  # case 3.13
    assert cut.finish_reason == "length" or isinstance(json.loads(cut.message.content), dict)


CALL = '<tool_call>{"name": "weather", "arguments": {"town": "Oslo"}}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "content", "calls"),
    [
        (CALL, None, 1),
        (f"Let me see. {CALL}\n{CALL}", "Let me see. ", 2),
        ("No call: a < b.", "No call: a < b.", 0),
        ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', "=", 0),  # was not offered
        ('<tool_call>{"name": "weather", "argum', "=", 0),
    ],
)
def test_what_the_model_calls(tools: Gateway, said: str, content: str | None, calls: int, stream: bool) -> None:
    options = {"tools": [WEATHER], "max_tokens": 200, "extra_body": {"guided_choice": [said]}}
    if stream:
        deltas = [chunk.choices[0] for chunk in tools.stream(**options)]
        text = "".join(one.delta.content or "" for one in deltas) or None
        called = [call for one in deltas for call in one.delta.tool_calls or []]
        assert [call.index for call in called] == list(range(calls))
        finish = deltas[-1].finish_reason
    else:
        [choice] = tools.say(**options).choices
        text, called, finish = choice.message.content, choice.message.tool_calls or [], choice.finish_reason
    assert text == (said if content == "=" else content)
    assert finish == ("tool_calls" if calls else "stop")
    assert [(call.function.name, json.loads(call.function.arguments)) for call in called] == [
        ("weather", {"town": "Oslo"})
    ] * calls
    assert len({call.id for call in called}) == calls


def test_one_call_at_most(tools: Gateway) -> None:
    script = {"guided_choice": [CALL + CALL]}
    answer = tools.say(tools=[WEATHER], parallel_tool_calls=False, max_tokens=200, extra_body=script)
    assert len(answer.choices[0].message.tool_calls) == 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call(tools: Gateway, choice: Any, stream: bool) -> None:
    other = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
    offered = [WEATHER] if choice == "required" else [other, WEATHER]
    options: dict[str, Any] = {"tools": offered, "tool_choice": choice, "max_tokens": 120}
    if stream:
        deltas = [chunk.choices[0] for chunk in tools.stream(**options)]
        [call] = [call for one in deltas for call in one.delta.tool_calls or []]
        finish = deltas[-1].finish_reason
    else:
        [whole] = tools.say(**options).choices
        [call], finish = whole.message.tool_calls, whole.finish_reason
        assert whole.message.content is None
    assert (call.function.name, finish) == ("weather", "tool_calls")
    assert json.loads(call.function.arguments)["town"] in ("Oslo", "Rome")


def test_a_conversation_with_tools(tools: Gateway) -> None:
    """The client's own object of the first answer goes back as it is."""
    script = {"guided_choice": [CALL]}
    first = tools.say(tools=[WEATHER], max_tokens=200, extra_body=script).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}
    tools.say(messages=[*ASK, first, result], tools=[WEATHER])
    prompt = tools.link.tokenizer.decode(Watched.made[-1].inputs["input_ids"][0])
    assert "<tool_call>weather Oslo</tool_call>" in prompt
    assert "[tool] rain" in prompt
    assert '"name": "weather"' in prompt
    tools.say(tools=[WEATHER], tool_choice="none")
    assert "weather" not in tools.link.tokenizer.decode(Watched.made[-1].inputs["input_ids"][0])


@pytest.mark.parametrize("arguments", ["[1]", "{", '{"a":' * 5000, '{"a": NaN}', '{"a": "\\ud800"}'])
def test_arguments_that_are_no_object(gateway: Gateway, arguments: str) -> None:
    """Of a call that the client says there was; deep ones end no answer."""
    call = {"id": "abc", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    with pytest.raises(openai.BadRequestError, match="arguments of the call 'abc' are not a JSON object"):
        gateway.say(messages=[*ASK, {"role": "assistant", "tool_calls": [call]}])


def test_a_template_without_tools_or_none_at_all(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(openai.BadRequestError, match="knows no tools"):
        gateway.say(tools=[WEATHER])
    monkeypatch.setattr(gateway.link.tokenizer, "chat_template", None)
    with pytest.raises(openai.BadRequestError, match="/v1/completions"):
        gateway.say()
    monkeypatch.setattr(gateway.link.tokenizer, "chat_template", "{{ raise_exception(messages[0].content) }}")
    with pytest.raises(openai.BadRequestError, match="refuses these messages") as caught:
        gateway.say()
    assert "fox" not in str(caught.value)


# -- what is refused -------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown": ({"extra_body": {"top_a": 1}}, "top_a", "unknown_parameter"),
    "unknown and null": ({"extra_body": {"top_a": None}}, "top_a", "unknown_parameter"),
    "unknown in a message": ({"messages": [{**ASK[0], "weight": 1}]}, "messages.0.weight", "unknown_parameter"),
    "of the other route": ({"extra_body": {"echo": True}}, "echo", "unknown_parameter"),
    "store": ({"store": True}, "store", "unsupported_parameter"),
    "audio": ({"extra_body": {"audio": {"voice": "a"}}}, "audio", "unsupported_parameter"),
    "functions": ({"extra_body": {"functions": []}}, "functions", "unsupported_parameter"),
    "reasoning": ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
    "tier": ({"service_tier": "priority"}, "service_tier", "unsupported_parameter"),
    "stop empty": ({"stop": [""]}, "stop", "invalid_value"),
    "stop long": ({"stop": "x" * 5000}, "stop", "invalid_value"),
    "stop a number": ({"extra_body": {"stop": 1}}, "stop", "invalid_value"),
    "cold": ({"temperature": -1}, "temperature", "invalid_value"),
    "temperature a text": ({"extra_body": {"temperature": "hot"}}, "temperature", "invalid_value"),
    "top_p": ({"top_p": 0}, "top_p", "invalid_value"),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 21}, "logprobs", "invalid_value"),
    "no tokens": ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    "half a token": ({"extra_body": {"max_tokens": 1.5}}, "max_tokens", "invalid_value"),
    "n": ({"n": 0}, "n", "invalid_value"),
    "bias": ({"logit_bias": {"70": 101}}, "logit_bias", "invalid_value"),
    "bias of a word": ({"logit_bias": {"fox": 1}}, "logit_bias", "invalid_value"),
    "bias of no token": ({"logit_bias": {"999999": 1}}, "logit_bias", "invalid_value"),
    "role": ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role", "invalid_value"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        "messages.0.content",
        "invalid_value",
    ),
    "no messages": ({"messages": []}, "messages", "invalid_value"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_by_name(gateway: Gateway, case: str) -> None:
    """Case 3.12: nothing is accepted and then ignored."""
    options, param, code = REFUSED[case]
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.say(**options)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.type == "invalid_request_error"
    assert not Watched.made or case == "bias of no token"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"top_logprobs": 2}, "goes with logprobs"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "differ"),
        ({"stream_options": {"include_usage": True}}, "goes with stream"),
        ({"n": 2}, "greedy"),
        ({"response_format": {"type": "json_object"}, "extra_body": {"guided_regex": "a"}}, "exclude each other"),
        ({"extra_body": {"speculate": "draft"}}, "draft model"),
        ({"extra_body": {"guided_regex": "("}}, "regex|pattern|expression"),
        ({"messages": [{"role": "user", "content": "x" * 1100}]}, "shorten"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
        ({"tools": [WEATHER, WEATHER]}, "one name"),
        ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "no room for calls"),
        ({"tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]}, "strict functions"),
        ({"tool_choice": "required"}, "goes with tools"),
    ],
)
def test_what_does_not_go_together(gateway: Gateway, options: dict[str, Any], text: str) -> None:
    with pytest.raises(openai.BadRequestError, match=text):
        gateway.say(**options)


def test_labels_and_values_that_change_nothing(gateway: Gateway) -> None:
    plain = gateway.say()
    same = gateway.say(
        user="me", metadata={"a": "b"}, store=False, service_tier="auto", stream=False, parallel_tool_calls=True,
        n=1, stop=[], modalities=["text"], extra_body={"safety_identifier": "x", "functions": None, "top_k": -1},
    )  # fmt: skip
    assert same.choices[0].message.content == plain.choices[0].message.content


def test_another_model(gateway: Gateway) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        gateway.chat(model="gpt-4o", messages=ASK)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


# -- places ----------------------------------------------------------------------------------------------------------


def test_whoever_leaves_gives_up_the_place(gateway: Gateway) -> None:
    """Case 3.6, cancelled: what was made until then is counted, and the next is served."""
    Watched.go.clear()
    stream = gateway.say(stream=True, max_tokens=150)
    next(iter(stream))
    stream.close()
    [left] = Watched.made
    until(lambda: left.is_cancelled)
    Watched.go.set()
    assert gateway.say().usage.completion_tokens == 8
    [answer] = left.answers().answers
    assert 1 <= len(answer.tokens) < 150


def test_leaving_without_a_stream(gateway: Gateway) -> None:
    Watched.go.clear()
    body = json.dumps({"model": MODEL, "messages": ASK, "max_tokens": 150}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port)
    connection.request(
        "POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    )
    until(lambda: Watched.made)
    connection.close()
    until(lambda: Watched.made[0].is_cancelled)
    Watched.go.set()
    assert gateway.say().choices[0].finish_reason == "length"


def test_a_queue_of_one(gateway: Gateway) -> None:
    desk = gateway.server.gateway.desk
    Watched.go.clear()
    first = gateway.say(stream=True)
    answers: list[Any] = []
    second = threading.Thread(target=lambda: answers.append(gateway.say(max_tokens=3)))
    second.start()
    until(lambda: desk.waiting == 1)
    with pytest.raises(openai.RateLimitError) as caught:
        gateway.say()
    assert caught.value.code == "too_many_waiting"
    assert caught.value.response.headers["retry-after"]
    Watched.go.set()
    assert len(list(first)) > 1
    second.join(WAIT_S)
    assert answers[0].usage.completion_tokens == 3


def test_leaving_the_queue(gateway: Gateway) -> None:
    desk = gateway.server.gateway.desk
    Watched.go.clear()
    first = gateway.say(stream=True)
    body = json.dumps({"model": MODEL, "messages": ASK, "max_tokens": 5}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port)
    connection.request(
        "POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    )
    until(lambda: desk.waiting == 1)
    connection.close()
    until(lambda: desk.waiting == 0)
    Watched.go.set()
    assert len(list(first)) > 1
    until(lambda: desk.working == 0)
    assert len(Watched.made) == 1  # the other was never begun


def test_several_at_a_time(target: str, tmp_path: Path) -> None:
    with linked(target, tmp_path, parallel=2, queue=0) as gateway:
        alone = gateway.say(max_tokens=16).choices[0].message.content
        Watched.go.clear()
        both = [gateway.say(stream=True, max_tokens=16) for _ in range(2)]
        Watched.go.set()
        for stream in both:
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == alone


# -- when the server fails -------------------------------------------------------------------------------------------


def test_the_server_goes_in_the_middle_of_a_stream(target: str, tmp_path: Path) -> None:
    with RecordingProxy(target) as proxy, linked(proxy.target, tmp_path) as gateway:
        Watched.go.clear()
        stream = iter(gateway.say(stream=True, max_tokens=100))
        next(stream)
        proxy.close()
        Watched.go.set()
        with pytest.raises(openai.APIError, match="away") as caught:
            list(stream)
        assert caught.value.code == "server_unreachable"
        with pytest.raises(openai.InternalServerError) as again:
            gateway.say()
        assert (again.value.status_code, again.value.code) == (503, "server_unreachable")
        assert again.value.response.headers["x-should-retry"] == "false"
        assert gateway.raw("GET", "/healthz")[:2] == (200, {"status": "ok"})


def lie(method: str, direction: str, index: int, raw: bytes) -> bytes:
    if (method, direction) != ("Evaluate", "down") or index < 1:
        return raw
    answer = pb.EvaluateResponse.FromString(raw)
    answer.data = bytes([answer.data[0] ^ 1]) + answer.data[1:]
    return answer.SerializeToString()


def test_a_failed_check_ends_it_for_good(target: str, tmp_path: Path) -> None:
    masked = {"protocol": "masked", "pool": tmp_path / "pool", "state_dir": tmp_path / "state", "batch": 64}
    with RecordingProxy(target) as proxy, linked(proxy.target, tmp_path, masked) as gateway:
        assert gateway.raw("GET", "/healthz")[0] == 200
        proxy.tamper = lie
        for _ in range(2):
            with pytest.raises(openai.InternalServerError) as caught:
                gateway.say(max_tokens=2)
            assert (caught.value.status_code, caught.value.code) == (502, "integrity_check_failed")
            assert caught.value.response.headers["x-should-retry"] == "false"
        status, health, _ = gateway.raw("GET", "/healthz")
        assert (status, health["status"]) == (503, "failed")
        assert health["reason"]


def test_a_failed_check_that_nobody_waits_for(target: str, tmp_path: Path) -> None:
    """An answer of fixed length goes on when its client has left."""
    masked = {"protocol": "masked", "pool": tmp_path / "pool", "state_dir": tmp_path / "state", "batch": 64}
    with RecordingProxy(target) as proxy, linked(proxy.target, tmp_path, masked) as gateway:
        Watched.go.clear()
        stream = gateway.say(stream=True, max_tokens=20, extra_body={"fixed_length": True})
        next(iter(stream))
        stream.close()
        proxy.tamper = lie
        Watched.go.set()
        until(lambda: not gateway.server.gateway.desk.working)
        assert gateway.raw("GET", "/healthz")[0] == 503


def test_an_end_in_the_middle_of_answers(target: str, tmp_path: Path) -> None:
    with linked(target, tmp_path) as gateway:
        Watched.go.clear()
        stream = iter(gateway.say(stream=True, max_tokens=100))
        next(stream)
        waiting: list[BaseException] = []

        def wait() -> None:
            with pytest.raises(openai.InternalServerError) as refused:
                gateway.say()
            waiting.append(refused.value)

        other = threading.Thread(target=wait)
        other.start()
        until(lambda: gateway.server.gateway.desk.waiting == 1)
        gateway.server.should_exit = True
        until(lambda: Watched.made[0].is_cancelled)
        Watched.go.set()
        with pytest.raises(openai.APIError, match="closing"):
            list(stream)
        other.join(WAIT_S)
        assert "closing" in str(waiting[0])


def test_an_end_before_a_body_has_come(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(run, "_LAST_S", 1)
    with linked(target, tmp_path) as gateway:
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=WAIT_S)
        with closing(connection):
            connection.putrequest("POST", "/v1/chat/completions")
            connection.putheader("authorization", f"Bearer {KEY}")
            connection.putheader("content-type", "application/json")
            connection.putheader("content-length", "100")
            connection.endheaders(b"{")
            until(lambda: gateway.server.server_state.tasks)
            gateway.server.should_exit = True
            answer = connection.getresponse()
            assert (answer.status, json.loads(answer.read())["error"]["code"]) == (503, "closing")
    assert not any(record.exc_info for record in caplog.records)


# -- who may ask -----------------------------------------------------------------------------------------------------

BODY = json.dumps({"model": MODEL, "messages": ASK, "max_tokens": 1}).encode()


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 200, None),
        ({"host": "localhost:{port}"}, 200, None),
        ({"host": "[::1]:{port}", "origin": "http://[::1]:{port}"}, 200, None),
        ({"origin": "http://127.0.0.1:{port}"}, 200, None),
        ({"content_type": "application/json; charset=utf-8"}, 200, None),
        ({"host": "evil.example:{port}"}, 403, "wrong_host"),
        ({"host": "127.0.0.1"}, 403, "wrong_host"),
        ({"host": "127.0.0.1:1"}, 403, "wrong_host"),
        ({"host": "127.0.0.1.evil.example:{port}"}, 403, "wrong_host"),
        ({"origin": "http://evil.example"}, 403, "wrong_origin"),
        ({"origin": "http://localhost:{port}"}, 403, "wrong_origin"),  # another than the host's
        ({"origin": "https://127.0.0.1:{port}"}, 403, "wrong_origin"),
        ({"origin": "null"}, 403, "wrong_origin"),
        ({"authorization": None}, 401, "invalid_api_key"),
        ({"authorization": "Bearer sk-sordino-" + "x" * 43}, 401, "invalid_api_key"),
        ({"authorization": "Bearer "}, 401, "invalid_api_key"),
        ({"authorization": "Bearer \xe4"}, 401, "invalid_api_key"),
        ({"authorization": f"Basic {KEY}"}, 401, "invalid_api_key"),
        ({"content_type": "text/plain"}, 415, "wrong_content_type"),
        ({"content_type": None}, 415, "wrong_content_type"),
    ],
)
def test_who_may_ask(gateway: Gateway, headers: dict[str, str | None], status: int, code: str | None) -> None:
    said = {name: value and value.replace("{port}", str(gateway.port)) for name, value in headers.items()}
    got, body, sent = gateway.raw(body=BODY, **said)
    assert got == status
    assert (body["error"]["code"] if code else None) == code
    assert not [name for name in sent if name.lower().startswith("access-control")]
    assert sent["x-content-type-options"] == "nosniff"


def test_a_browser_that_asks_first_gets_no_leave(gateway: Gateway) -> None:
    asked = {"origin": "http://evil.example", "access_control_request_method": "POST", "authorization": None}
    status, _, sent = gateway.raw("OPTIONS", **asked)
    assert status == 403
    assert not [name for name in sent if name.lower().startswith("access-control")]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("DELETE", "/v1/models", 405),
    ],
)
def test_routes_that_are_not_there(gateway: Gateway, method: str, path: str, status: int) -> None:
    got, body, _ = gateway.raw(method, path)
    assert (got, set(body["error"])) == (status, {"message", "type", "param", "code"})
    assert gateway.raw(method, path, authorization=None)[0] == 401


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"\xff", 400),
        (b'{"model": "tiny", "messages": [], "temperature": NaN}', 400),
        (b'{"model": "tiny", "prompt": "\\ud800"}', 400),
        (b"[" * 100_000, 400),
        (b" " * (app.MAX_BODY_BYTES + 1), 413),
    ],
)
def test_bodies(gateway: Gateway, body: bytes, status: int) -> None:
    got, said, _ = gateway.raw(body=body)
    assert (got, set(said["error"])) == (status, {"message", "type", "param", "code"})


def test_slow_clients(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_BODY_S", 0.2)
    monkeypatch.setattr(run, "_HEADERS_S", 0.2)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{gateway.port}\r\nAuthorization: Bearer {KEY}\r\n"
        "Content-Type: application/json\r\nContent-Length: 100\r\n"
    )
    with socket.create_connection(("127.0.0.1", gateway.port), WAIT_S) as slow:
        slow.sendall(head.encode() + b'\r\n{"model"')
        assert slow.recv(1000).startswith(b"HTTP/1.1 408 ")
    with socket.create_connection(("127.0.0.1", gateway.port), WAIT_S) as slow:
        slow.sendall(head.encode()[:40])
        assert slow.recv(1000) == b""


def test_nothing_of_a_prompt_is_logged(
    gateway: Gateway,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Not even where an answer fails in a way that nobody thought of."""

    def fail(self: Any) -> None:
        raise RuntimeError(self.link.tokenizer.decode(self.inputs["input_ids"][0]))

    gateway.say()
    monkeypatch.setattr(Watched, "run", fail)
    with pytest.raises(openai.InternalServerError) as caught:
        gateway.say()
    assert caught.value.code == "internal_error"
    with pytest.raises(openai.BadRequestError):
        gateway.say(messages=[{"role": "user", "content": {"fox": 1}}])
    out, err = capfd.readouterr()
    logged = caplog.text + out + err + str(caught.value)
    assert "RuntimeError" in logged
    assert "fox" not in logged


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hosted(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(bundle, tmp_path_factory.mktemp("hosted")) as server:
        yield server


def test_the_command(hosted: ServerProcess, tmp_path: Path) -> None:
    """As a user starts it: what it says, the key it makes, a server that dies and comes back, and an orderly end."""
    environment = {**os.environ, "SORDINO_TOKEN": hosted.token, "OMP_NUM_THREADS": "1"}
    environment |= {name: str(tmp_path / name) for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")}
    port_file, log = tmp_path / "port", tmp_path / "log"
    command = [str(Path(sys.executable).with_name("sordino")), "gateway", "--server", hosted.target, "--port", "0"]
    command += ["--ca", str(hosted.ca), "--batch", "64", "--port-file", str(port_file), "--wait", "0.3"]
    command += ["--name", "gpt-4o"]
    with log.open("w") as out, subprocess.Popen(command, env=environment, stdout=out, stderr=out) as process:
        try:
            until(lambda: process.poll() is not None or (port_file.exists() and port_file.read_text()))
            assert process.poll() is None, log.read_text()
            key_file = tmp_path / "XDG_DATA_HOME/sordino/gateway/key"
            assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
            key, said = key_file.read_text().strip(), log.read_text()
            assert str(key_file) in said
            assert "provisioning 64 tokens" in said
            assert key not in said
            curl = next(line for line in said.splitlines() if "curl" in line)
            shown = subprocess.run(["sh", "-c", curl], capture_output=True, text=True, timeout=WAIT_S)
            assert json.loads(shown.stdout)["choices"][0]["message"]["role"] == "assistant", shown
            with OpenAI(base_url=f"http://127.0.0.1:{port_file.read_text()}/v1", api_key=key, max_retries=0) as client:

                def ask() -> Any:
                    return client.chat.completions.create(model="gpt-4o", messages=ASK, max_tokens=2)

                assert ask().usage.completion_tokens == 2
                known = {**os.environ, "OPENAI_BASE_URL": str(client.base_url), "OPENAI_API_KEY": key}
                example = [sys.executable, str(Path(__file__).parents[2] / "examples" / "openai_chat.py")]
                printed = subprocess.run(example, env=known, capture_output=True, text=True, timeout=WAIT_S)
                assert re.search(r"^tokens: +\d+$", printed.stdout, re.MULTILINE), printed.stderr
                hosted.kill()
                with pytest.raises(openai.InternalServerError) as caught:
                    ask()
                assert caught.value.status_code == 503
                hosted.restart()

                def served() -> bool:
                    # gRPC tries again after a second or so, and this gateway waits for 0.3 s alone.
                    with contextlib.suppress(openai.InternalServerError):
                        return bool(ask().usage.completion_tokens == 2)
                    return False

                until(served)
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0, log.read_text()
            assert "fox" not in log.read_text()
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--host", "0.0.0.0"), "listens on 127.0.0.1 or ::1 alone"),
        (("--host", "example.org"), "listens on 127.0.0.1 or ::1 alone"),
        (("--port", "{taken}"), "cannot be had"),
    ],
)
def test_where_it_does_not_listen(arguments: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sordino.client.cli import gateway as command

    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        value = arguments[1].replace("{taken}", str(taken.getsockname()[1]))
        chosen: dict[str, Any] = {arguments[0][2:]: int(value) if value.isdecimal() else value}
        # Nothing is sent to the server before: there is none.
        with pytest.raises(RangeError, match=text):
            command("grpc://127.0.0.1:9", **chosen)


def test_a_port_that_another_program_takes_meanwhile(gateway: Gateway, tmp_path: Path) -> None:
    """Two may bind it, as long as neither listens."""
    with bind("127.0.0.1", 0) as ours, bind("127.0.0.1", ours.getsockname()[1]) as other:
        other.listen()
        with pytest.raises(RangeError, match="cannot be had: Address already in use: choose another with --port"):
            run.serve(gateway.link, ours, tmp_path / "key", Settings(model=MODEL), Console(), None)
