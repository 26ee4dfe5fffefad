"""How servers are asked to continue token ids, and where their replies have the ids of what they wrote."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headstart.servers.client import Endpoint

_PAGE_SECONDS = 60.0
"""For a page about the server itself."""


class NoTokenIds(KeyError):
    """A reply has text and no token ids: text cannot be turned back into the ids that were written."""


@dataclass(frozen=True)
class Ask:
    """What a server is to continue, and how; at a temperature of 0 greedily.

    `ends` are tokens that end the answer, where the server can be told; None leaves it to the server's own.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    ends: frozenset[int] | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields that every server knows. What is left out would be taken from the target's files, penalties too."""
        fields: dict[str, Any] = {"temperature": self.temperature, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        if self.temperature > 0:
            fields |= {"top_k": self.top_k, "top_p": self.top_p, "min_p": 0.0, "seed": self.seed}
        return fields


@dataclass(frozen=True)
class Reply:
    """What a server wrote: the ids after the prompt's.

    `prompt` are the ids that it says it read, or only how many (`prompt_length`); None where it does not say. It may
    have stopped at an end that is the server's alone (`at_own_end`), or given up in the middle.
    """

    tokens: list[int]
    prompt: list[int] | None = None
    prompt_length: int | None = None
    at_own_end: bool = False
    aborted: bool = False


class Dialect(ABC):
    """Paths and bodies of a kind of server."""

    @abstractmethod
    def request(self, ask: Ask, model: str) -> tuple[str, dict[str, Any]]:
        """Path and body that ask for a continuation of token ids by a model of this name."""

    @abstractmethod
    def read(self, reply: dict[str, Any]) -> Reply:
        """What was written; a KeyError (`NoTokenIds` among them), IndexError or TypeError where the reply is none."""

    @abstractmethod
    def tokenize(self, text: str, model: str) -> tuple[str, dict[str, Any]]:
        """Path and body that ask for the `tokens` of a text, without special ones."""


class OpenAI(Dialect):
    """OpenAI's completions with vLLM's additions."""

    def request(self, ask: Ask, model: str) -> tuple[str, dict[str, Any]]:
        body = {"model": model, "prompt": list(ask.prompt), "max_tokens": ask.max_new_tokens, **ask.sampling}
        body |= {"repetition_penalty": 1.0, "return_token_ids": True}
        if ask.ends is not None:
            body |= {"stop_token_ids": sorted(ask.ends), "ignore_eos": True}
        return "/v1/completions", body

    def read(self, reply: dict[str, Any]) -> Reply:
        choice = reply["choices"][0]
        if choice.get("token_ids") is None:
            raise NoTokenIds("token_ids")
        prompt = choice.get("prompt_token_ids")
        aborted = choice.get("finish_reason") in ("abort", "error")
        return Reply(list(choice["token_ids"]), None if prompt is None else list(prompt), aborted=aborted)

    def tokenize(self, text: str, model: str) -> tuple[str, dict[str, Any]]:
        return "/tokenize", {"model": model, "prompt": text, "add_special_tokens": False}


class LlamaServer(Dialect):
    """llama-server's own completions: those that are like OpenAI's say no token ids."""

    def request(self, ask: Ask, model: str) -> tuple[str, dict[str, Any]]:
        body = {"prompt": list(ask.prompt), "n_predict": ask.max_new_tokens, **ask.sampling}
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


@dataclass(frozen=True)
class Served:
    """A model of a server, under the server's name for it.

    Attributes:
        window: longest text with its answer, in tokens; None where the server does not say.
        slots: requests that llama-server decodes at once; None where the server does not say.
    """

    dialect: Dialect
    model: str
    window: int | None
    slots: int | None = None


def served_by(endpoint: Endpoint, spec: str) -> Served:
    """A server's model of this Hub id or path; its first model by default."""
    listed = endpoint.ask("GET", "/v1/models", absent={"data": []}, seconds=_PAGE_SECONDS).get("data")
    models = [model for model in listed if isinstance(model, dict)] if isinstance(listed, list) else []
    served = next((model for model in models if spec in (model.get("id"), model.get("root"))), (models or [{}])[0])
    name = str(served.get("id", ""))
    if served.get("owned_by") != "llamacpp":
        return Served(OpenAI(), name, _positive(served.get("max_model_len")))
    about = endpoint.ask("GET", "/props", absent={}, seconds=_PAGE_SECONDS)
    slot = about.get("default_generation_settings")
    window = _positive(slot.get("n_ctx")) if isinstance(slot, dict) else None
    return Served(LlamaServer(), name, window, _positive(about.get("total_slots")))


def _positive(number: Any) -> int | None:
    return number if isinstance(number, int) and number > 0 else None
