"""Request bodies of the server: OpenAI's fields, some of vLLM's, and `draft`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from headstart.decode.options import DecodeKeywords, Draft
from headstart.decoder import Decoder

_Id = Annotated[int, Field(ge=0, lt=1 << 31)]
_Ids = Annotated[list[_Id], Field(min_length=1)]
_Length = Annotated[int, Field(ge=1, lt=1 << 31)]
_Likeliest = Annotated[int, Field(ge=0, le=20)]
_Stop = Annotated[str, Field(min_length=1)]
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "stop_token_ids", "draft"),
)
"""Fields that are decoding options of the same name."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TextFormat(_Body):
    type: Literal["text"]


class _Request(_Body):
    """Fields of both routes. A null counts as absent."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: _Length | None = None
    max_completion_tokens: _Length | None = None
    min_tokens: _Id | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[Annotated[int, Field(strict=False, ge=0, lt=1 << 31)], float] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[_Id], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    draft: Draft | None = None
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


class ChatRequest(_Request):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: _Likeliest | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: TextFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(_Request):
    """Body of /v1/completions."""

    prompt: str | _Ids | Annotated[list[str], Field(min_length=1)] | Annotated[list[_Ids], Field(min_length=1)]
    logprobs: _Likeliest | None = None


Request = ChatRequest | CompletionRequest


def tools_of(request: Request) -> list[dict[str, Any]]:
    """Return the tools that the answer may call."""
    return (isinstance(request, ChatRequest) and request.tool_choice != "none" and request.tools) or []


def stops_of(request: Request) -> list[str]:
    return [request.stop] if isinstance(request.stop, str) else request.stop or []


def prompts_of(request: Request, decoder: Decoder) -> list[list[int]]:
    """Tokenize the prompts. Raises the errors of `Decoder.tokens`."""
    if isinstance(request, ChatRequest):
        variables = request.chat_template_kwargs
        return [decoder.tokens(request.messages, tools=tools_of(request), chat_template_kwargs=variables)]
    one = isinstance(request.prompt, str) or isinstance(request.prompt[0], int)
    return [decoder.tokens(prompt, raw=True) for prompt in cast(Any, [request.prompt] if one else request.prompt)]


def options_of(request: Request, defaults: Mapping[str, float], limit: int) -> DecodeKeywords:
    """Return the decoding options, with `defaults` and `limit` where the request gives nothing."""
    given = {name: value for name in _SAMPLING if (value := getattr(request, name)) is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    limit = request.max_completion_tokens or request.max_tokens or limit
    logprobs = request.logprobs
    if isinstance(request, ChatRequest):
        logprobs = (request.top_logprobs or 0) if request.logprobs or request.top_logprobs else None
    others = {
        "max_new_tokens": limit,
        # `Decoder` has no way to go on after an end token, only to bar it.
        "min_new_tokens": limit if request.ignore_eos else request.min_tokens or 0,
        "stop": stops_of(request),
        "logprobs": logprobs,
        "source": request.user or "",
    }
    return cast(DecodeKeywords, {**defaults, **given, **others})
