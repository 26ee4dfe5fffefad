"""How each engine is started with heads, how many drafts it is asked for, and what it does not do everywhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from headstart.heads.exchange.published import BLOCKS, Layout, Published
from headstart.hub.engines.gguf_file import FILE
from headstart.hub.target_facts import TargetFacts

_WHOLE = {*BLOCKS, Layout.MEDUSA}
"""Arrangements that are asked for every token they were trained to draft: one pass drafts all of them."""
_ON_GPUS = (
    "vLLM drafts with DSpark heads on GPUs alone (V2 model runner), and they cannot be served as DFlash, whose slots "
    "draft their own places and not the next ones: on a CPU serve them with llama.cpp (--format gguf)."
)
_UNEQUAL_NORMS = (
    "vLLM's CPU build norms the text's keys in every layer with the k_norm of the first, and accepts fewer "
    "drafts; its GPU builds do not. For a CPU train with heads.num_layers=1, or serve these with llama.cpp."
)


def serve_commands(
    engines: Iterable[str],
    folder: Path | str,
    published: Published,
    facts: TargetFacts,
    drafts: Mapping[str, int],
) -> dict[str, list[str]]:
    """The words of the command that serves target and heads, for each engine that is a server.

    `drafts` are tokens of the chain by engine, where they were measured.
    """
    makers = {"vllm": _vllm, "sglang": _sglang, "llama.cpp": _llama_cpp}
    return {
        engine: makers[engine](str(folder), published, facts, drafts_of(published, drafts.get(engine, 0)))
        for engine in engines
        if engine in makers
    }


def _vllm(folder: str, published: Published, facts: TargetFacts, drafts: int) -> list[str]:
    config = {"method": str(published.layout), "model": folder, "num_speculative_tokens": drafts}
    return ["vllm", "serve", facts.folder or "TARGET", *_trust(facts), "--speculative-config", json.dumps(config)]


def _sglang(folder: str, published: Published, facts: TargetFacts, drafts: int) -> list[str]:
    algorithm = {Layout.EAGLE3: "EAGLE3", Layout.DFLASH: "DFLASH"}.get(published.layout, "EAGLE")
    words = ["python", "-m", "sglang.launch_server", "--model-path", facts.folder or "TARGET", *_trust(facts)]
    words += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", folder]
    if published.layout is not Layout.DFLASH:
        words += ["--speculative-num-steps", str(drafts), "--speculative-eagle-topk", "1"]
    return [*words, "--speculative-num-draft-tokens", str(drafts + 1)]  # the root is one of them


def _trust(facts: TargetFacts) -> list[str]:
    """vLLM and SGLang call it the same."""
    return ["--trust-remote-code"] if facts.trust_remote_code else []


def _llama_cpp(folder: str, published: Published, facts: TargetFacts, drafts: int) -> list[str]:
    words = ["llama-server", "-m", str(facts.gguf or "TARGET.gguf"), "-md", f"{folder}/{FILE}"]
    return [*words, "--spec-type", f"draft-{published.layout}", "--spec-draft-n-max", str(drafts)]


def drafts_of(published: Published, drafts: int = 0) -> int:
    """Tokens of the chain that an engine drafts: those measured to pay, else a few; later ones are seldom accepted."""
    return min(drafts or (published.steps if published.layout in _WHOLE else 3), published.steps)


def drafts_to_try(published: Published, usual: Sequence[int]) -> list[int]:
    """Numbers of drafts to measure in an engine: the usual ones as far as the heads reach, and a block as a whole."""
    whole = {published.steps} if published.layout in BLOCKS else set()
    return sorted({count for count in usual if count <= published.steps} | whole)


def engine_remarks(published: Published, engine: str) -> list[str]:
    """What the user should know of heads that an engine reads as they are, and does not serve everywhere."""
    if engine != "vllm":
        return []
    if published.layout is Layout.MEDUSA:
        return ["vLLM reads Medusa heads up to version 0.32."]
    if published.layout not in BLOCKS:
        return []
    remarks = [_ON_GPUS] if published.layout is Layout.DSPARK else []
    first, *others = (
        published.tensors[f"layers.{number}.self_attn.k_norm.weight"] for number in range(published.num_layers)
    )
    return [*remarks, _UNEQUAL_NORMS] if any(not other.equal(first) for other in others) else remarks
