"""Request bodies of the server: OpenAI's fields, those that vLLM adds, and `draft`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from headstart.decode.options import DecodeKeywords, Draft
from headstart.decoder import Decoder

_Count = Annotated[int, Field(ge=0, lt=1 << 31)]
_Ids = Annotated[list[_Count], Field(min_length=1)]
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
    max_tokens: Annotated[_Count, Field(ge=1)] | None = None
    min_tokens: _Count | None = None
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
    stop_token_ids: Annotated[list[_Count], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    draft: Draft | None = None
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def limit(self) -> int | None:
        """The longest answer that was asked for, in tokens."""
        return self.max_tokens

    @property
    def offers_tools(self) -> bool:
        return False

    @property
    def likeliest(self) -> int | None:
        """The number of most likely tokens to list for each token; None for no log-probabilities."""
        raise NotImplementedError

    def prompts(self, decoder: Decoder) -> list[list[int]]:
        """Tokenize the prompts; raises the errors of `Decoder.tokens`."""
        raise NotImplementedError

    def keywords(self, defaults: Mapping[str, float], limit: int) -> DecodeKeywords:
        """Return the decoding options, with `defaults` and `limit` where the request gives nothing."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if given.get("top_k") == -1:
            given["top_k"] = 0
        longest = self.limit or limit
        others = {
            "max_new_tokens": longest,
            # The decoder bars end tokens before this many tokens; it has no other way to go on after one.
            "min_new_tokens": longest if self.ignore_eos else self.min_tokens or 0,
            "stop": self.stops,
            "logprobs": self.likeliest,
            "source": self.user or "",
        }
        return cast(DecodeKeywords, {**defaults, **given, **others})


class ChatRequest(_Request):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[_Count, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: TextFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def offers_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompts(self, decoder: Decoder) -> list[list[int]]:
        tools = self.tools or [] if self.offers_tools else []
        return [decoder.tokens(self.messages, tools=tools, chat_template_kwargs=self.chat_template_kwargs)]


class CompletionRequest(_Request):
    """Body of /v1/completions."""

    prompt: str | _Ids | Annotated[list[str], Field(min_length=1)] | Annotated[list[_Ids], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    def prompts(self, decoder: Decoder) -> list[list[int]]:
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [decoder.tokens(prompt, raw=True) for prompt in cast(Any, [self.prompt] if one else self.prompt)]
