"""How servers are asked to continue token ids, and where their replies have the ids of what they wrote."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class NoTokenIds(KeyError):
    """A reply has text and no token ids: text cannot be turned back into the ids that were written."""


@dataclass(frozen=True)
class Ask:
    """What a server is to continue, and how.

    Attributes:
        prompt: token ids.
        max_new_tokens: most tokens to add.
        temperature: 0 is greedy, and the settings below say nothing then.
        top_k: likeliest tokens that are drawn from; 0 is all.
        top_p: nucleus.
        seed: of the draws; None leaves it to the server.
        ends: tokens that end the answer, where the server can be told; None leaves it to the server's own.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    ends: frozenset[int] | None = None


@dataclass(frozen=True)
class Reply:
    """What a server wrote.

    Attributes:
        tokens: ids, the prompt's left out.
        prompt: the ids that it says it read; None where it does not say.
        prompt_length: how many these were; None where it does not say.
        at_own_end: whether it stopped at a token that ends answers for the server.
        aborted: whether the server gave up in the middle.
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
        """What was written.

        Raises:
            NoTokenIds: the reply has none.
            KeyError, IndexError, TypeError: it is no reply of this kind of server.
        """

    @abstractmethod
    def tokenize(self, text: str, model: str) -> tuple[str, dict[str, Any]]:
        """Path and body that ask for the `tokens` of a text, without special ones."""


class OpenAI(Dialect):
    """OpenAI's completions with vLLM's additions."""

    def request(self, ask: Ask, model: str) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {"model": model, "prompt": list(ask.prompt), "max_tokens": ask.max_new_tokens}
        # What is left out is taken from the target's generation config, penalties too.
        body |= {"temperature": ask.temperature, "repetition_penalty": 1.0}
        body |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "return_token_ids": True}
        if ask.temperature > 0:
            body |= {"top_k": ask.top_k, "top_p": ask.top_p, "min_p": 0.0, "seed": ask.seed}
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
        body: dict[str, Any] = {"prompt": list(ask.prompt), "n_predict": ask.max_new_tokens}
        # What is left out is taken from the file of the target, penalties too.
        body |= {"temperature": ask.temperature, "repeat_penalty": 1.0}
        body |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "return_tokens": True, "cache_prompt": False}
        if model:
            body["model"] = model
        if ask.temperature > 0:
            body |= {"top_k": ask.top_k, "top_p": ask.top_p, "min_p": 0.0, "seed": ask.seed}
        return "/completion", body

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
