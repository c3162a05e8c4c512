"""What may be asked: the bodies of requests, validated. Pure; knows neither model nor tokenizer.

A field is supported, or it is ignored because it cannot change the answer (``user``, ``store``, …), or it is refused
where its value asks for what is not there (``best_of: 2``) and accepted where it does not (``best_of: 1``), or it is
unknown and refused: a misspelt parameter that is silently dropped gives a wrong answer that looks right. ``null`` means
not given, everywhere.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from headrace.errors import MissingDependency
from headrace.serving.wire import Refusal, refuse

try:
    from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
except ImportError as error:
    raise MissingDependency(
        "Serving needs pydantic.", f"Importing it failed: {error}.", 'Install it with: pip install "headrace[serve]"'
    ) from error

MOST_CHOICES = 16
MOST_PROMPTS = 64
MOST_STOPS = 16
LONGEST_STOP = 1024
"""Characters. Every token is compared with every beginning of every stop string."""

Ignored = Any
"""Accepted, and without effect: it says something about the caller or the provider's own machinery, not about the
answer."""


def neutral(*values: Any) -> Any:
    """Return the type of a field of which only ``values`` (and null) can be honoured."""

    def check(value: Any) -> Any:
        if value is not None and not any(value == item and type(value) is type(item) for item in values):
            raise ValueError("is not supported by this server")
        return value

    return Annotated[Any, AfterValidator(check)]


def _read_stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return None
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MOST_STOPS:
        raise ValueError(f"has more than {MOST_STOPS} strings")
    if any(not stop or len(stop) > LONGEST_STOP for stop in stops):
        raise ValueError(f"must not hold an empty string, or one of more than {LONGEST_STOP} characters")
    return stops


def _read_prompt(value: Any) -> Any:
    """Return a list of prompts, each a text or a list of token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(_is_token(item) for item in value):
            return [value]
        if all(
            isinstance(item, str) or (isinstance(item, list) and item and all(map(_is_token, item))) for item in value
        ):
            if len(value) > MOST_PROMPTS:
                raise ValueError(f"has more than {MOST_PROMPTS} prompts")
            return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists, and not empty")


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _read_content(value: Any) -> Any:
    if (
        value is None
        or isinstance(value, str)
        or (isinstance(value, list) and all(isinstance(part, dict) for part in value))
    ):
        return value
    raise ValueError("must be a string or a list of content parts")


def _read_input(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and value and all(isinstance(item, dict) for item in value)):
        return value
    raise ValueError("must be a string or a list of items, and not empty")


def _read_logit_bias(value: Any) -> Any:
    if value is None:
        return None
    good = isinstance(value, dict) and all(
        token.isdecimal() and isinstance(bias, (int, float)) and not isinstance(bias, bool) and -100 <= bias <= 100
        for token, bias in value.items()
    )
    if not good:
        raise ValueError("must map token ids to numbers from -100 to 100")
    return {int(token): float(bias) for token, bias in value.items()}


def _read_tool_choice(value: Any) -> Any:
    if value not in (None, "none", "auto"):
        raise ValueError("must be 'none' or 'auto': this server cannot force a call")
    return value


def _read_plain_format(value: Any) -> Any:
    if value is not None and (not isinstance(value, dict) or value.get("type") != "text"):
        raise ValueError("must be {'type': 'text'}: this server does not constrain what a model writes")
    return value


def _read_text(value: Any) -> Any:
    if value is not None:
        if not isinstance(value, dict) or set(value) - {"format", "verbosity"}:
            raise ValueError("may hold 'format' and 'verbosity' only")
        _read_plain_format(value.get("format"))
    return value


Content = Annotated[Any, BeforeValidator(_read_content)]
PlainFormat = Annotated[Any, BeforeValidator(_read_plain_format)]
ToolChoice = Annotated[Any, BeforeValidator(_read_tool_choice)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(_Body):
    """``stream_options``."""

    include_usage: bool | None = None
    include_obfuscation: Ignored = None


class _Sampling(_Body):
    """What all three ways of asking have in common."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    # What vLLM, SGLang and Transformers understand beyond the OpenAI API.
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)


class Completing(_Sampling):
    """What chat and plain completions have in common."""

    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stop: Annotated[list[str] | None, BeforeValidator(_read_stops)] = None
    max_tokens: int | None = Field(None, ge=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_read_logit_bias)] = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> Completing:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class FunctionCall(BaseModel):
    """What an earlier turn called."""

    name: str
    arguments: str


class PastToolCall(BaseModel):
    """A tool call of an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
    """One message of a chat.

    Fields of earlier answers that mean nothing to a template (``refusal``, ``annotations``, …) are dropped.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    name: str | None = None
    tool_calls: list[PastToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Function(BaseModel):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool of the chat API: its function stands in a field of its own."""

    type: Literal["function"]
    function: Function


class ChatRequest(Completing):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    response_format: PlainFormat = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: neutral(["text"], []) = None  # type: ignore[valid-type]
    prediction: Ignored = None
    verbosity: Ignored = None
    audio: neutral() = None  # type: ignore[valid-type]
    functions: neutral([]) = None  # type: ignore[valid-type]
    function_call: neutral("none", "auto") = None  # type: ignore[valid-type]
    web_search_options: neutral() = None  # type: ignore[valid-type]
    moderation: neutral() = None  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only allowed when logprobs is true")
        return self


class CompletionRequest(Completing):
    """``POST /v1/completions``."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_read_prompt)]
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = None
    echo: neutral(False) = None  # type: ignore[valid-type]
    suffix: neutral("") = None  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _check_best_of(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of must equal n: this server returns every sample that it makes")
        return self


class FunctionTool(BaseModel):
    """A tool of the responses API: flat."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseRequest(_Sampling):
    """``POST /v1/responses``. Nothing is stored, so nothing can be referred to."""

    input: Annotated[Any, BeforeValidator(_read_input)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    text: Annotated[Any, BeforeValidator(_read_text)] = None
    reasoning: Ignored = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: neutral("disabled") = None  # type: ignore[valid-type]
    include: neutral([]) = None  # type: ignore[valid-type]
    background: neutral(False) = None  # type: ignore[valid-type]
    top_logprobs: neutral(0) = None  # type: ignore[valid-type]
    previous_response_id: neutral() = None  # type: ignore[valid-type]
    conversation: neutral() = None  # type: ignore[valid-type]
    prompt: neutral() = None  # type: ignore[valid-type]
    max_tool_calls: Ignored = None
    context_management: Ignored = None
    moderation: neutral() = None  # type: ignore[valid-type]


Body = TypeVar("Body", bound=BaseModel)


def parse(kind: type[Body], body: bytes) -> Body:
    """Return the request in ``body``. Raises `Refusal` (400) that names the first bad field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _describe(error) from None


def validate(kind: type[Body], value: Any, place: str) -> Body:
    """Return ``value``, a part of a request that stands at ``place``, as a ``kind``.

    Raises `Refusal` (400) that names the first bad field.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _describe(error, place) from None


def _describe(error: ValidationError, place: str = "") -> Refusal:
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path, kind = _path(problem["loc"]), problem["type"]
    param = f"{place}.{path}".strip(".")
    if kind == "json_invalid":
        return Refusal(400, f"The body is not valid JSON: {problem['msg']}.", code="invalid_json")
    if not param and kind.startswith("model_"):
        return Refusal(400, "The body is not a JSON object.", code="invalid_json")
    if kind == "extra_forbidden":
        return refuse(param, f"Unrecognized request argument: {param}.", code="unknown_parameter")
    if kind == "missing":
        return refuse(param, f"Missing required parameter: {param}.", code="missing_required_parameter")
    message = problem["msg"].removeprefix("Value error, ")
    if not param:
        # A rule about several fields: its message begins with the name of the one that breaks it.
        name = message.split(" ", 1)[0]
        return refuse(name if name in message and "_" in name else None, f"{message}.")
    return refuse(param, f"{param}: {message}.", code="invalid_value")


def _path(location: tuple[int | str, ...]) -> str:
    """Return ``messages[0].role`` for such a place."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
