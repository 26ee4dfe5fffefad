"""Completion APIs of servers with token ids in and out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headstart.servers.client import Endpoint, RetryableError

_PAGE_SECONDS = 60.0
"""Timeout of requests about the server itself (/v1/models, /props)."""


class NoTokenIds(KeyError):
    """A reply with text but no token ids; re-tokenising text may give other ids."""


@dataclass(frozen=True)
class CompletionRequest:
    """A completion request; temperature 0 is greedy. `ends` overrides the server's end tokens if it supports that."""

    prompt: Sequence[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    ends: frozenset[int] | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields common to all servers. Missing ones, penalties too, would take the server's own defaults."""
        fields: dict[str, Any] = {"temperature": self.temperature, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        if self.temperature > 0:
            fields |= {"top_k": self.top_k, "top_p": self.top_p, "min_p": 0.0, "seed": self.seed}
        return fields


@dataclass(frozen=True)
class Reply:
    """Generated token ids, without the prompt's.

    `prompt` and `prompt_length` are the prompt as the server reports it, or None. `at_own_end`: it stopped at an end
    token of its own.
    """

    tokens: list[int]
    prompt: list[int] | None = None
    prompt_length: int | None = None
    at_own_end: bool = False


class Dialect(ABC):
    """API of a kind of server.

    Attributes:
        streams: whether its streamed events have the ids of all tokens.
        drafts_past_end: whether drafts past the maximum answer length count as accepted.
    """

    streams = True
    drafts_past_end = True

    @abstractmethod
    def request(self, completion: CompletionRequest, model: str) -> tuple[str, dict[str, Any]]:
        """Return path and body of a completion request to this model."""

    @abstractmethod
    def read(self, reply: dict[str, Any]) -> Reply:
        """Parse a reply; raises KeyError (including `NoTokenIds`), IndexError or TypeError if malformed, and
        `RetryableError` if the server gave up midway."""

    @abstractmethod
    def tokenize(self, text: str, model: str) -> tuple[str, dict[str, Any]]:
        """Return path and body of a request for the `tokens` of a text, without special tokens."""

    @abstractmethod
    def chat_prompt(self, endpoint: Endpoint, messages: Sequence[Mapping[str, Any]], model: str) -> list[int] | None:
        """Fetch the token ids of chat messages as the server renders them; None if it does not report them."""


class OpenAI(Dialect):
    """OpenAI's completions with vLLM's additions."""

    def request(self, completion: CompletionRequest, model: str) -> tuple[str, dict[str, Any]]:
        body = {
            "model": model,
            "prompt": list(completion.prompt),
            "max_tokens": completion.max_new_tokens,
            **completion.sampling,
        }
        body |= {"repetition_penalty": 1.0, "return_token_ids": True}
        if completion.ends is not None:
            body |= {"stop_token_ids": sorted(completion.ends), "ignore_eos": True}
        return "/v1/completions", body

    def read(self, reply: dict[str, Any]) -> Reply:
        choice = reply["choices"][0]
        if choice.get("token_ids") is None:
            raise NoTokenIds("token_ids")
        prompt = choice.get("prompt_token_ids")
        if choice.get("finish_reason") in ("abort", "error"):
            raise RetryableError("the server gave up in the middle of an answer")
        return Reply(list(choice["token_ids"]), None if prompt is None else list(prompt))

    def tokenize(self, text: str, model: str) -> tuple[str, dict[str, Any]]:
        return "/tokenize", {"model": model, "prompt": text, "add_special_tokens": False}

    def chat_prompt(self, endpoint: Endpoint, messages: Sequence[Mapping[str, Any]], model: str) -> list[int] | None:
        body = {"model": model, "messages": list(messages), "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        return endpoint.fetch("/v1/chat/completions", body, absent={}).get("prompt_token_ids")


class LlamaServer(Dialect):
    """llama-server's native completions; its OpenAI-compatible ones return no token ids.

    When streaming, it leaves out the ids of tokens that end within a multi-byte character.
    """

    streams = False
    drafts_past_end = False

    def request(self, completion: CompletionRequest, model: str) -> tuple[str, dict[str, Any]]:
        body = {"prompt": list(completion.prompt), "n_predict": completion.max_new_tokens, **completion.sampling}
        body |= {"repeat_penalty": 1.0, "return_tokens": True, "cache_prompt": False}
        return "/completion", body | ({"model": model} if model else {})

    def read(self, reply: dict[str, Any]) -> Reply:
        if not isinstance(reply.get("content"), str) and "tokens" not in reply:
            raise KeyError("content")
        if "tokens" not in reply:
            raise NoTokenIds("tokens")
        return Reply(
            list(reply["tokens"]),
            prompt_length=reply.get("tokens_evaluated"),
            at_own_end=reply.get("stop_type") == "eos",
        )

    def tokenize(self, text: str, model: str) -> tuple[str, dict[str, Any]]:
        return "/tokenize", {"content": text, "add_special": False, **({"model": model} if model else {})}

    def chat_prompt(self, endpoint: Endpoint, messages: Sequence[Mapping[str, Any]], model: str) -> list[int] | None:
        rendered = endpoint.fetch("/apply-template", {"messages": list(messages)}, absent={}).get("prompt")
        return None if rendered is None else endpoint.fetch(*self.tokenize(rendered, model)).get("tokens")


@dataclass(frozen=True)
class ServedModel:
    """A model on a server, by the server's name for it.

    Attributes:
        window: context length in tokens; None if not reported.
        slots: requests that llama-server decodes concurrently; None if not reported.
    """

    dialect: Dialect
    model: str
    window: int | None
    slots: int | None = None


def served_by(endpoint: Endpoint, spec: str) -> ServedModel:
    """Find the server's model of this Hub id or path; its first model by default."""
    listed = endpoint.fetch("/v1/models", absent={"data": []}, seconds=_PAGE_SECONDS).get("data")
    models = [model for model in listed if isinstance(model, dict)] if isinstance(listed, list) else []
    served = next((model for model in models if spec in (model.get("id"), model.get("root"))), (models or [{}])[0])
    name = str(served.get("id", ""))
    if served.get("owned_by") != "llamacpp":
        return ServedModel(OpenAI(), name, _positive(served.get("max_model_len")))
    about = endpoint.fetch("/props", absent={}, seconds=_PAGE_SECONDS)
    slot = about.get("default_generation_settings")
    window = _positive(slot.get("n_ctx")) if isinstance(slot, dict) else None
    return ServedModel(LlamaServer(), name, window, _positive(about.get("total_slots")))


def _positive(number: Any) -> int | None:
    return number if isinstance(number, int) and number > 0 else None
