"""What a request may say: OpenAI's fields, some of vLLM's, and Sordino's own. Nothing is accepted and then ignored.

Three kinds of fields are OpenAI's alone: labels for the books of a service, which mean nothing here whatever they say;
fields that are taken with the one value that changes nothing; and what this endpoint cannot do, refused by name like
every name that it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar

import pydantic_core
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from sordino.client.gateway.faults import ApiError
from sordino.client.guide import GuideSpec
from sordino.client.options import Options, Speculation
from sordino.shared.errors import RangeError, printable

T = TypeVar("T", bound="Request")
COMPLETION_TOKENS: Final = 16  # of /v1/completions, where the request does not say: as OpenAI defines it
_LABELS: Final = frozenset({"user", "safety_identifier", "metadata", "prompt_cache_key", "prompt_cache_retention"})
# Fields that are options of the same name and kind.
_SAME: Final = (
    *("temperature", "top_p", "n", "seed", "frequency_penalty", "presence_penalty", "min_p", "min_tokens"),
    *("repetition_penalty", "speculate", "draft_tokens", "fixed_drafts", "pad_prompt", "fixed_length"),
)
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


def _texts(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _content(value: object) -> object:
    """Parts become one text, as templates want it."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ValueError("only parts of type text are taken here: no images, sound or files")
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError('a part is {"type": "text", "text": ...}')
        texts.append(part["text"])
    return "\n".join(texts)


class CalledFunction(_Strict):
    name: str
    arguments: str


class ToolCall(_Strict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(_Strict):
    """A message of a conversation. What OpenAI's client repeats of an answer without there being any is null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_content)] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any] | None, Field(max_length=0)] = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to messages of the assistant")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id belongs to messages of role tool, each of which has one")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")
        return self

    def plain(self) -> dict[str, Any]:
        """As templates of ``transformers`` take it: ``developer`` is ``system``, arguments are objects.

        Raises:
            RangeError: arguments of a call that are not a JSON object.
        """
        said = self.model_dump(exclude_none=True)
        said["role"] = "system" if self.role == "developer" else self.role
        said.setdefault("content", "")
        said.pop("annotations", None)
        for call in said.get("tool_calls", ()):
            try:
                arguments = pydantic_core.from_json(call["function"]["arguments"] or "{}", allow_inf_nan=False)
            except ValueError:
                arguments = None
            if not isinstance(arguments, dict):
                raise RangeError(f"the arguments of the call {call['id'][:40]!r} are not a JSON object")
            call["function"]["arguments"] = arguments
        return said


class Function(_Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> Self:
        if not _NAME.fullmatch(self.name):
            raise ValueError("a function's name has up to 64 letters, digits, _ and -")
        return self


class Tool(_Strict):
    type: Literal["function"]
    function: Function


class ToolChoice(_Strict):
    """``name`` is that of the one function that must be called."""

    mode: Literal["none", "auto", "required"]
    name: str | None = None


def _choice(value: object) -> object:
    if value in ("none", "auto", "required"):
        return {"mode": value}
    if isinstance(value, dict) and set(value) == {"type", "function"} and value["type"] == "function":
        function = value["function"]
        if isinstance(function, dict) and set(function) == {"name"} and isinstance(function["name"], str):
            return {"mode": "required", "name": function["name"]}
    if value is None:
        return None
    raise ValueError('tool_choice is "none", "auto", "required" or {"type": "function", "function": {"name": ...}}')


class JsonSchema(_Strict):
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # the schema holds either way


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type json_schema, which needs it")
        return self


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Request(_Strict):
    """What both ways of asking have in common; None where the request does not say.

    ``top_k`` to ``guided_grammar`` are vLLM's, the rest from ``speculate`` on are Sordino's (:class:`Options`).
    """

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_texts)] = None
    max_tokens: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    bad_words: list[str] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    speculate: Speculation | None = None
    draft_tokens: int | None = None
    fixed_drafts: bool | None = None
    pad_prompt: int | None = None
    fixed_length: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_effect(cls, said: object) -> object:
        if not isinstance(said, dict):
            return said
        return {
            name: value
            for name, value in said.items()
            if name not in _LABELS and not (name in cls.neutral and (value is None or value in cls.neutral[name]))
        }

    @model_validator(mode="after")
    def _streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def guides(self) -> dict[str, GuideSpec]:
        """Guides by the field that asks for them."""
        said: dict[str, tuple[Literal["json_schema", "regex", "choice", "grammar"], Any]] = {
            "guided_json": ("json_schema", self.guided_json),
            "guided_regex": ("regex", self.guided_regex),
            "guided_choice": ("choice", self.guided_choice),
            "guided_grammar": ("grammar", self.guided_grammar),
        }
        return {name: GuideSpec(kind=kind, value=value) for name, (kind, value) in said.items() if value is not None}

    def decoding(self, *, most: int, logprobs: int | None, more: Mapping[str, GuideSpec]) -> Options:
        """The options of an answer.

        Args:
            most: tokens of an answer. logprobs: alternatives to each token. more: guides that other fields ask for.

        Raises:
            RangeError: a value that means nothing, or two fields that exclude each other.
        """
        guides = {**self.guides(), **more}
        if len(guides) > 1:
            raise RangeError(f"{' and '.join(guides)} exclude each other")
        said = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        if self.top_k is not None:
            said["top_k"] = 0 if self.top_k == -1 else self.top_k  # vLLM's way to say all
        if self.logit_bias:
            said["logit_bias"] = _by_token(self.logit_bias)
        return Options(
            max_tokens=most,
            stop=tuple(self.stop or ()),
            bad_words=tuple(self.bad_words or ()),
            logprobs=logprobs,
            guide=next(iter(guides.values()), None),
            **said,
        )


class ChatRequest(Request):
    """``POST /v1/chat/completions``"""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "store": (False,),
        "service_tier": ("auto", "default"),
        "modalities": (["text"],),
        **dict.fromkeys(("audio", "function_call", "functions", "moderation", "prediction", "reasoning_effort"), ()),
        **dict.fromkeys(("verbosity", "web_search_options"), ()),
    }

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(_choice)] = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs")
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("two tools have one name")
        if not names and self.tool_choice is not None and self.tool_choice.mode == "required":
            raise ValueError("tool_choice goes with tools")
        if self.tool_choice is not None and self.tool_choice.name not in (None, *names):
            raise ValueError("tool_choice names a function that is not among the tools")
        if self.choice.mode == "auto" and any(tool.function.strict for tool in self.tools or ()):
            raise ValueError("strict functions go with a tool_choice that forces a call: the model is free otherwise")
        formatted = self.response_format is not None and self.response_format.type != "text"
        if names and self.choice.mode == "auto" and formatted:
            raise ValueError("response_format leaves no room for calls: leave out tools, or say tool_choice")
        return self

    @property
    def choice(self) -> ToolChoice:
        return self.tool_choice or ToolChoice(mode="auto" if self.tools else "none")

    def options(self, default_tokens: int, more: Mapping[str, GuideSpec]) -> Options:
        """As :meth:`decoding`."""
        said = dict(more)
        if self.response_format is not None and self.response_format.json_schema is not None:
            said["response_format"] = GuideSpec(kind="json_schema", value=self.response_format.json_schema.schema_)
        elif self.response_format is not None and self.response_format.type == "json_object":
            said["response_format"] = GuideSpec(kind="json")
        asked = next((most for most in (self.max_completion_tokens, self.max_tokens) if most is not None), None)
        most = default_tokens if asked is None else asked
        return self.decoding(most=most, logprobs=(self.top_logprobs or 0) if self.logprobs else None, more=said)


def _prompts(value: object) -> object:
    """A text, several, one prompt's tokens, or several prompts' tokens: always a list of prompts."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(item) is int for item in value)):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) and item and all(type(token) is int for token in item) for item in value):
            return value
    raise ValueError("prompt is a text, a list of texts, a list of tokens, or a list of lists of tokens")


class CompletionRequest(Request):
    """``POST /v1/completions``"""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"echo": (False,), "suffix": ("",), "best_of": (1,)}

    prompt: Annotated[list[Any], BeforeValidator(_prompts)]
    logprobs: int | None = None

    def options(self) -> Options:
        """As :meth:`decoding`."""
        most = COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return self.decoding(most=most, logprobs=self.logprobs, more={})


def parse(kind: type[T], body: bytes) -> T:
    """A request from its bytes.

    Raises:
        ApiError: they are not JSON, or not what the endpoint takes; the text names the field and repeats no value.
    """
    try:
        said = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError:
        raise ApiError(400, "the body is not JSON in UTF-8", code="invalid_json") from None
    try:
        return kind.model_validate(said)
    except ValidationError as error:
        raise _refusal(kind, error) from None


def _refusal(kind: type[Request], error: ValidationError) -> ApiError:
    found = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path = [part for part in found["loc"] if isinstance(part, int) or _NAME.fullmatch(part)]
    where = printable(".".join(str(part)[:40] for part in path)) or None
    if found["type"] == "extra_forbidden":
        name = printable(str(found["loc"][-1]))[:40]
        known = len(found["loc"]) == 1 and name in kind.neutral
        text = f"{name} is not supported" if known else f"{name!r} is no field that is known here"
        return ApiError(400, text, param=where or name, code="unsupported_parameter" if known else "unknown_parameter")
    text = found["msg"].removeprefix("Value error, ")
    code = "missing_required_parameter" if found["type"] == "missing" else "invalid_value"
    return ApiError(400, f"{where}: {text}" if where else text, param=where, code=code)


def _by_token(biases: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in biases.items()}
    except ValueError:
        raise RangeError("logit_bias gives numbers from -100 to 100 by token, which is a whole number") from None
