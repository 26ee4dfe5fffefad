"""Options for loading heads and their target, for Python and the command line. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from headstart.decode.options import document_options, option

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Exact = Literal["auto", "bits", "tokens"]
Quantization = Literal["none", "int8", "int4"]


@document_options
@dataclass(frozen=True)
class LoadOptions:
    """How heads and their target are loaded. A target that is loaded already keeps dtype, device and quantization."""

    dtype: Dtype = option(
        "auto", "Dtype to compute in; auto is bfloat16 where the machine is fast at it, else float32."
    )
    device: str = option("auto", "Where to compute; auto is a GPU if available, all spreads the target over all GPUs.")
    any_target: bool = option(False, "Accept a target that the heads were not trained on, if its sizes match.")
    exact: Exact = option(
        "auto",
        "bits: greedy text in bfloat16 equals plain decoding token for token (CPUs with compiled kernels). "
        "tokens (auto): equal up to rounding at near-ties.",
    )
    quantization: Quantization | None = option(
        None,
        "Quantise the target's linear layers (needs torchao).",
        default_text="as when the heads were exported or tuned",
    )
    revision: str | None = option(None, "Branch, tag or commit of heads on the Hub.")
    trust_remote_code: bool = option(False, "Run Python code from the target's folder or repository.")
    token: str | bool | None = option(None, "Hub token; by default from `hf auth login` or HF_TOKEN.", on_cli=False)
    tokenizer: Any = option(None, "Tokenizer of a target that is a loaded transformers model.", on_cli=False)
    log: Any = option(
        None, "Folder, or headstart.data.served.log.RequestLog, to log requests and answers in.", on_cli=False
    )
    follow: bool = option(
        False, "If heads is a link that `headstart adapt` moves: switch to newer heads between requests.", on_cli=False
    )


class LoadKeywords(TypedDict, total=False):
    """The fields of `LoadOptions` as keyword arguments."""

    dtype: Dtype
    device: str
    any_target: bool
    exact: Exact
    quantization: Quantization | None
    revision: str | None
    trust_remote_code: bool
    token: str | bool | None
    tokenizer: Any
    log: Any
    follow: bool
