"""Options of `headstart eval` and `headstart audit`, for Python and the command line. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headstart.decode.options import DecodeOptions, ServingOptions, document_options, meaning, option
from headstart.servers.names import ENGINES


@document_options
@dataclass(frozen=True)
class EvalOptions(DecodeOptions):
    """Options of a measurement: `DecodeOptions` for every method as far as they apply to it, and more."""

    drafter: str = option("heads", meaning(DecodeOptions, "drafter").text, metavar="NAME")
    seed: int = option(0, "Seed for sampling; prompt b uses seed + b.")
    compare: Sequence[str] = option(
        (),
        "Also measure these drafters, alternating with the heads: names as for --drafter, dynamic, static, chain "
        "(the heads, with such trees), or all (these trees, ngram, heads+ngram, lookahead and early-exit).",
        metavar="NAME,NAME...",
    )
    limit: int | None = option(None, "Ask at most this many questions.", minimum=1)
    batch_size: int = option(
        1, "Decode this many prompts together. transformers' prompt lookup takes only one.", minimum=1
    )
    sweep_batch: Sequence[int] = option((), "Also measure these batch sizes.", minimum=1, metavar="N,N...")
    long_context: int | None = option(
        None,
        "Also measure long prompts, made of the questions and answers: 512 tokens, 1024 and so on up to this many.",
        minimum=512,
    )
    multi_turn: bool = option(
        False,
        "Ask every turn, following plain decoding's answers to the earlier ones; by default only the first.",
    )
    baselines: bool = option(
        True, "Measure transformers, too, on some of the prompts: on a CPU they take half of the time."
    )
    heads_name: str = option("heads", "Name of the heads in the report.", on_cli=False)
    questions_name: str | None = option(None, "Name of the questions in the report.", on_cli=False)


@document_options
@dataclass(frozen=True)
class AuditOptions:
    """Options of an audit."""

    drafters: Sequence[str] = option(
        (),
        "Prove greedy decoding for these drafters: names as for `eval --compare`, 'random heads', 'always wrong'.",
        metavar="NAME,NAME...",
        default_text="one of each kind",
    )
    batch_sizes: Sequence[int] = option((1, 16), "Batch sizes of the greedy proof.", on_cli=False)
    max_new_tokens: int = option(32, "Longest greedy answer, in tokens.", minimum=1)
    verifier: Sequence[str] = option(
        (), "Prove sampling for these verifiers.", metavar="NAME,NAME...", default_text="both"
    )
    temperature: Sequence[float] = option(
        (), "Sample at these temperatures; 0 alone leaves the greedy proof.", metavar="T,T...", default_text="0.7,1"
    )
    top_p: float = option(0.9, meaning(DecodeOptions, "top_p").text)
    samples: int = option(2000, "Samples for each prompt, verifier and temperature.", minimum=1)
    texts: int = option(2, "Number of prompts to sample after: the most sensitive ones.", on_cli=False)
    depth: int = option(3, "Tokens of a sample; all but the first are decided by verifying drafts.", on_cli=False)
    seed: int = option(0, meaning(DecodeOptions, "seed").text)
    raw: bool = option(False, meaning(DecodeOptions, "raw").text)
    limit: int | None = option(None, "Ask at most this many questions.", minimum=1)
    heads_name: str = option("heads", "Name of the heads in the report.", on_cli=False)


@document_options
@dataclass(frozen=True)
class AuditedEngine(ServingOptions):
    """A serving engine to audit: started with the heads, or at an address."""

    engine: str = option(
        "",
        f"Audit a serving engine ({ENGINES}, or the address of a running one) instead of headstart's loop.",
        metavar="NAME|URL",
    )
    engine_requests: Sequence[int] = option(
        (1, 4, 8), "Numbers of concurrent requests to test.", minimum=1, maximum=1024, metavar="N,N..."
    )
