"""Traits of vLLM, SGLang, speculators and llama.cpp as readers of heads; rules for all engines are in `faults.py`.

From the sources of vLLM 0.32, SGLang of mid-2026 and speculators 0.9.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.heads.exchange.published import BLOCKS, DFLASH2_LOGITS, EMBEDDINGS, FUSED, Layout, Published
from headstart.hub.engines.base import (
    AGAIN,
    DFLASH,
    DFLASH2,
    DSPARK,
    EAGLE3,
    EAGLE3_NORMED,
    HEADS_GGUF,
    SGLANG_EAGLE,
    Faults,
)
from headstart.hub.engines.checkpoint import AUX_IDS, CONFIG, CORRECT, WRITE, Checkpoint
from headstart.hub.target_facts import TargetFacts


@dataclass(frozen=True)
class EngineTraits:
    """How an engine treats heads.

    Attributes:
        name: the name users type.
        architectures: names of the heads in config.json by layout, the usual one first.
        when_missing, when_unknown: behaviour for a missing and an unknown tensor.
        rotary: supported RoPE types.
        last_layer_unread: layouts that cannot read the output of the target's last layer.
        divides_heads: whether the hidden size must be a multiple of the number of attention heads (as in transformers'
            LlamaConfig).
        needs_markov: whether it identifies DSpark heads by their Markov head.
        ignored: settings of EAGLE-3 heads that it ignores; if there are any, it runs one layer that reads three of the
            target's.
        reads_speculators: whether it reads configs of the speculators library; without `architectures` no others.
        shares_lm_head: whether EAGLE-3 heads without an LM head use the target's.
        has_fc_bias: whether `fc` has a bias in EAGLE-1 heads.
        has_verifier: whether it knows tensors of the target in folders of block drafters.
        without_hooks: model types of targets that pass it no hidden states of inner layers.
        faults: checks of a folder for this engine alone, by layout.
        command: builds the serve command from the heads' folder, heads, target, and drafts by concurrent requests; None
            if it is not a server.
        remarks: notes on heads that it reads but does not serve everywhere.
    """

    name: str
    architectures: Mapping[Layout, tuple[str, ...]] = field(default_factory=dict)
    when_missing: str = "leaves it random silently"
    when_unknown: str = "stops at it"
    rotary: tuple[str, ...] = ("default", "linear", "llama3", "yarn", "dynamic")
    only_silu: bool = True
    last_layer_unread: frozenset[Layout] = frozenset()
    divides_heads: bool = True
    needs_markov: bool = False
    ignored: tuple[str, ...] = ()
    reads_speculators: bool = False
    shares_lm_head: bool = True
    has_fc_bias: bool = False
    has_verifier: bool = False
    without_hooks: frozenset[str] = frozenset()
    faults: Mapping[Layout, Callable[[Checkpoint, Published], Faults]] = field(default_factory=dict)
    command: Callable[[str, Published, TargetFacts, Mapping[int, int]], list[str]] | None = None
    remarks: Callable[[Published], list[str]] = lambda _: []


_DFLASH = {Layout.DFLASH: (DFLASH,), Layout.DFLASH2: (DFLASH2,)}
LESS_CAUSAL = "Export with another --format, or train with heads.causal=false."
OURS = EngineTraits("headstart", when_missing="needs it")


def tensor_faults(
    required: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    traits: EngineTraits,
) -> Faults:
    """Report missing, unknown and misshapen tensors."""
    for name in required:
        if name not in shapes:
            yield f"The tensor {name} is missing, and {traits.name} {traits.when_missing}.", AGAIN
    expected = {**optional, **required}
    for name, shape in sorted(shapes.items()):
        if name not in expected:
            yield f"{traits.name} has no tensor {name} in these heads, and {traits.when_unknown}.", AGAIN
        elif shape != expected[name]:
            yield f"The tensor {name} is {list(shape)}, and the config requires {list(expected[name])}.", AGAIN


# -- vLLM --------------------------------------------------------------------------------------------------------------

VLLM_ON_GPUS = {
    Layout.DSPARK: "vLLM drafts with DSpark heads only on GPUs (V2 model runner), and cannot serve them as DFlash "
    "heads, where slots draft their own positions: on a CPU use llama.cpp (--format gguf).",
    Layout.DFLASH2: "vLLM drafts with DFlash 2 heads only on GPUs (V2 model runner), otherwise without pairwise "
    "scores.",
}
"""Remarks on layouts that vLLM drafts with only on GPUs."""
_ADAPTIVE = (
    "enable_adaptive_verification: vLLM verifies only drafts that the confidence head expects to be worth their time. "
    "On GPUs other than H100, H200 and B200 add --attention-backend TRITON_ATTN. vLLM refuses the option with LoRA, "
    "pipeline parallelism, --enforce-eager and state-space layers: leave it out there, and for `headstart audit`."
)
_TWO_KINDS = (
    "vLLM runs blocks with both sliding and full layers only in its newer model runner "
    "(VLLM_USE_V2_MODEL_RUNNER=1), which its CPU build lacks."
)
_PARALLEL = (
    "Without parallel_drafting in --speculative-config vLLM ignores mask_hidden, feeds drafts back as to EAGLE-3 heads "
    "and accepts few. vLLM sets it itself for a folder of --format speculators."
)
_MOST_REQUESTS = 4096
"""End of the last range of vLLM's schedule, which it clips at `--max-num-seqs`."""
_UNEQUAL_NORMS = (
    "vLLM's CPU build norms context keys of every layer with the k_norm of the first, and accepts fewer drafts. "
    "For a CPU train with heads.num_layers=1, or serve with llama.cpp."
)


def _eagle3_in_vllm(checkpoint: Checkpoint, settings: Published) -> Faults:
    top, nested = checkpoint.aux_ids
    if nested and not top:
        yield (
            f"vLLM uses the nested layer ids {list(nested)} unchanged, and so reads one layer too low.",
            f"Write {AUX_IDS} = {[layer + 1 for layer in nested]} at the top of {CONFIG}.",
        )
    count = checkpoint.config.get("num_aux_hidden_states") or len(nested or ()) or 3
    if checkpoint.is_speculators:
        count = 3
        if settings.layout is Layout.PEAGLE and settings.aux_norms:
            problem = "vLLM does not read fc_norm in P-EAGLE configs of speculators, and stops at its tensors."
            yield problem, "Export with --format vllm."
    if (ids := top or nested) and len(ids) != count:
        yield (
            f"vLLM fuses {count} layers for these heads, and there are {len(ids)} layer ids.",
            f"Export with --format vllm, or write num_aux_hidden_states = {len(ids)} into {CONFIG}.",
        )
    model_type, architecture = ("qwen3", EAGLE3_NORMED) if settings.qk_norm else ("llama", EAGLE3)
    if checkpoint.is_speculators:
        layers = checkpoint.config.get("transformer_layer_config")
        kind = layers.get("model_type") if isinstance(layers, dict) else None
        normed, given = kind == "qwen3", f"model_type {kind!r}"
        remedy = f"Write model_type = {model_type} into transformer_layer_config of {CONFIG}."
    else:
        normed, given = EAGLE3_NORMED in (checkpoint.config.get("architectures") or []), "these architectures"
        remedy = f"Write architectures = [{architecture!r}] and model_type = {model_type!r} into {CONFIG}."
    if normed != settings.qk_norm:
        yield (
            f"vLLM {'norms' if normed else 'does not norm'} queries and keys of layers with {given}, and the file "
            f"{'has' if settings.qk_norm else 'lacks'} such norms.",
            remedy,
        )
    has_bias = any(name.endswith("o_proj.bias") for name in checkpoint.shapes)
    if checkpoint.settings.get("attention_bias") and not has_bias:
        yield "With attention_bias vLLM expects a bias of o_proj, and leaves it random if missing.", AGAIN


def _medusa_in_vllm(checkpoint: Checkpoint, settings: Published) -> Faults:
    config = checkpoint.config
    if (model_type := config.get("model_type")) != "medusa":
        yield f"vLLM recognises Medusa heads by model_type medusa, not {model_type!r}.", CORRECT
    count = config.get("num_heads", config.get("medusa_num_heads"))
    if isinstance(count, int) and count > settings.steps:
        yield f"The config has {count} heads and the file {settings.steps}: vLLM leaves the rest random.", AGAIN
    if any(name.endswith(".bias") for name in checkpoint.names) and config.get("medusa_fc_bias") is not True:
        yield "vLLM drops the blocks' biases unless medusa_fc_bias is true.", WRITE
    if config.get("truncated_vocab_size") not in (None, config.get("vocab_size")):
        problem = "vLLM 0.32 cannot load Medusa heads with a reduced vocabulary (token_map)."
        yield problem, "Train with heads.draft_vocab_size=0 heads.shared_lm_head=true."


def _block_in_vllm(checkpoint: Checkpoint, settings: Published) -> Faults:
    config, causal = checkpoint.settings, settings.causal_layers
    confidence = ("enable_confidence_head", "confidence_head_with_markov") if settings.confidence else ()
    missing = [name for name in ("markov_rank", *confidence) if not config.get(name)]
    if settings.markov_rank and missing:
        yield f"vLLM reads {' and '.join(missing)} only at the top of the config.", WRITE
    nested = config.get("dflash_config") or {}
    outside = [name for name in DFLASH2_LOGITS if config.get(name) not in (None, 0, 1) and nested.get(name) is None]
    if settings.layout is Layout.DFLASH2 and outside:
        yield f"vLLM reads {' and '.join(outside)} in dflash_config alone.", WRITE
    if config.get("is_causal") is not None or not checkpoint.is_speculators:
        return
    if settings.layout is Layout.DSPARK:
        if any(settings.sliding) and not any(causal):
            remedy = f"Write is_causal = false into transformer_layer_config of {CONFIG}."
            yield "vLLM runs sliding layers of DSpark causally unless is_causal is false.", remedy
    elif config.get("sliding_window_non_causal") is False and not all(causal):
        remedy = f"Write sliding_window_non_causal = true into {CONFIG}."
        if settings.sliding_window:
            remedy = "Serve these with --format vllm."
        yield "sliding_window_non_causal is false, and vLLM 0.32 then runs all layers causally.", remedy


def _block_in_sglang(checkpoint: Checkpoint, settings: Published) -> Faults:
    config = checkpoint.settings
    if config.get("is_causal") is None and settings.causal_layers != settings.sliding:
        causal = str(settings.causal).lower()
        yield f"SGLang reads causality only from is_causal, which should be {causal} here.", WRITE
    if settings.sliding_window and "sliding_attention" not in (config.get("layer_types") or []):
        yield "SGLang reads sliding layers only from layer_types, not from use_swa.", WRITE


def _vllm(folder: str, published: Published, facts: TargetFacts, drafts: Mapping[int, int]) -> list[str]:
    parallel = published.layout is Layout.PEAGLE
    config: dict[str, Any] = {
        "method": str(Layout.EAGLE3 if parallel else published.layout).removesuffix("2"),
        "model": folder,
    }
    if parallel:
        config["parallel_drafting"] = True
    config["num_speculative_tokens"] = max(drafts.values())
    if published.confidence:  # trained for sampled drafts, and replaces the schedule
        config |= {"draft_sample_method": "probabilistic", "enable_adaptive_verification": True}
    elif len(drafts) > 1:
        lasts = [*(first - 1 for first in list(drafts)[1:]), _MOST_REQUESTS]
        config["num_speculative_tokens_per_batch_size"] = [
            [first, last, count] for (first, count), last in zip(drafts.items(), lasts, strict=True)
        ]
    return [
        "vllm",
        "serve",
        facts.folder or "TARGET",
        *facts.server_options,
        "--speculative-config",
        json.dumps(config),
    ]


def _vllm_remarks(published: Published) -> list[str]:
    if published.layout is Layout.MEDUSA:
        return ["vLLM reads Medusa heads up to version 0.32."]
    if published.layout is Layout.PEAGLE:
        return [_PARALLEL]
    if published.layout not in BLOCKS:
        return []
    remarks = [VLLM_ON_GPUS[published.layout]] if published.layout in VLLM_ON_GPUS else []
    remarks += [_ADAPTIVE] if published.confidence else []
    if len(set(published.sliding)) > 1:
        remarks.append(_TWO_KINDS)
    first, *others = (
        published.tensors[f"layers.{number}.self_attn.k_norm.weight"] for number in range(published.num_layers)
    )
    return [*remarks, _UNEQUAL_NORMS] if any(not other.equal(first) for other in others) else remarks


# Targets without SupportsEagle3 in vLLM 0.32.
_WITHOUT_HOOKS = frozenset(
    {
        *("bloom", "cohere", "cohere2", "dbrx", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "gemma", "gemma2"),
        *("gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gptj"),
        *("granitemoe", "granitemoehybrid", "granitemoeshared", "lfm2", "lfm2_moe", "longcat_flash", "mixtral"),
        *("nemotron", "olmoe", "opt", "qwen2_moe", "stablelm"),
    }
)


def extracts_states(model_type: str) -> bool:
    """Whether vLLM extracts hidden states of targets of this type."""
    return model_type not in _WITHOUT_HOOKS


_VLLM = EngineTraits(
    "vllm",
    {
        Layout.EAGLE3: (EAGLE3, "Eagle3LlamaForCausalLM", "LlamaForCausalLM", EAGLE3_NORMED),
        Layout.PEAGLE: (EAGLE3, "Eagle3LlamaForCausalLM", "LlamaForCausalLM", EAGLE3_NORMED),
        Layout.EAGLE: ("LlamaForCausalLM", "EagleLlamaForCausalLM"),
        **_DFLASH,
        Layout.DSPARK: (DSPARK, "DSparkDraftModel"),
        Layout.MEDUSA: ("MedusaModel",),
    },
    needs_markov=True,
    reads_speculators=True,
    without_hooks=_WITHOUT_HOOKS,
    faults={
        **dict.fromkeys(FUSED, _eagle3_in_vllm),
        Layout.MEDUSA: _medusa_in_vllm,
        **dict.fromkeys(BLOCKS, _block_in_vllm),
    },
    command=_vllm,
    remarks=_vllm_remarks,
)

# -- SGLang ------------------------------------------------------------------------------------------------------------


def _eagle3_in_sglang(checkpoint: Checkpoint, settings: Published) -> Faults:
    config = checkpoint.settings
    top, nested = checkpoint.aux_ids
    if top and not nested:
        yield (
            f"SGLang reads layer ids only from eagle_config, and would use its default layers, not {list(top)}.",
            f"Write eagle_config.{AUX_IDS} = {[layer - 1 for layer in top]} into {CONFIG}.",
        )
    if config.get("tie_word_embeddings", True) is not False:
        yield "SGLang uses the embeddings as the LM head unless tie_word_embeddings is false.", WRITE
    if "draft_vocab_size" not in checkpoint.config:
        yield "SGLang needs draft_vocab_size, also for the full vocabulary.", WRITE
    if config.get("attention_bias"):
        yield "SGLang ignores attention biases.", "Serve them with vLLM."


def _sglang(folder: str, published: Published, facts: TargetFacts, drafts: Mapping[int, int]) -> list[str]:
    algorithm = {Layout.EAGLE3: "EAGLE3", **dict.fromkeys(_DFLASH, "DFLASH")}.get(published.layout, "EAGLE")
    words = ["python", "-m", "sglang.launch_server", "--model-path", facts.folder or "TARGET", *facts.server_options]
    count = max(drafts.values())
    words += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", folder]
    if algorithm != "DFLASH":
        words += ["--speculative-num-steps", str(count), "--speculative-eagle-topk", "1"]
    return [*words, "--speculative-num-draft-tokens", str(count + 1)]  # counts the root


_SGLANG = EngineTraits(
    "sglang",
    {Layout.EAGLE3: (EAGLE3,), Layout.EAGLE: (SGLANG_EAGLE,), **_DFLASH},
    when_unknown="ignores it",
    last_layer_unread=frozenset({Layout.EAGLE3}),
    ignored=("norm_before_residual", "norm_output", "aux_norms", "norm_before_fc", "qk_norm"),
    has_fc_bias=True,
    faults={Layout.EAGLE3: _eagle3_in_sglang, **dict.fromkeys(BLOCKS, _block_in_sglang)},
    command=_sglang,
    remarks=lambda one: ["SGLang drafts with DFlash 2 heads after 0.5.18."] if one.layout is Layout.DFLASH2 else [],
)

# -- speculators -------------------------------------------------------------------------------------------------------


def _eagle3_in_speculators(checkpoint: Checkpoint, settings: Published) -> Faults:
    if EMBEDDINGS not in checkpoint.shapes:
        yield "The classes of speculators fill missing embeddings with zeros.", AGAIN


def _block_in_speculators(_: Checkpoint, settings: Published) -> Faults:
    if settings.causal and not settings.sliding_window:
        problem = "speculators runs layers without a sliding window bidirectionally; these heads run them causally."
        yield problem, LESS_CAUSAL


_SPECULATORS = EngineTraits(
    "speculators",
    when_missing="only warns",
    when_unknown="ignores it",
    only_silu=False,
    reads_speculators=True,
    shares_lm_head=False,
    has_verifier=True,
    faults={**dict.fromkeys(FUSED, _eagle3_in_speculators), **dict.fromkeys(BLOCKS, _block_in_speculators)},
)

# -- llama.cpp ---------------------------------------------------------------------------------------------------------


def _llama_cpp(folder: str, published: Published, facts: TargetFacts, drafts: Mapping[int, int]) -> list[str]:
    words = ["llama-server", "-m", str(facts.gguf or "TARGET.gguf"), "-md", f"{folder}/{HEADS_GGUF}"]
    words += facts.template_option("--chat-template-kwargs")
    method = str(published.layout).removesuffix("2")  # engines recognise DFlash 2 by its files
    return [*words, "--spec-type", f"draft-{method}", "--spec-draft-n-max", str(max(drafts.values()))]


_MANY_SLOTS = (
    "llama-server runs several slots by default, and is reported to accept fewer drafts with many slots: compare "
    "draft_n_accepted with --parallel 1."
)

LLAMA_CPP = EngineTraits(
    "llama.cpp",
    when_missing="stops without it",
    rotary=("default", "linear", "llama3"),
    last_layer_unread=frozenset({Layout.EAGLE3, *BLOCKS}),
    divides_heads=False,
    needs_markov=True,
    ignored=("norm_output", "aux_norms", "qk_norm"),
    command=_llama_cpp,
    remarks=lambda _: [_MANY_SLOTS],
)

KNOWN_ENGINES = {engine.name: engine for engine in (_VLLM, _SGLANG, _SPECULATORS, LLAMA_CPP)}

# -- serve commands and numbers of drafts ------------------------------------------------------------------------------


def serve_commands(
    engines: Iterable[str],
    folder: Path | str,
    published: Published,
    facts: TargetFacts,
    drafts: Mapping[str, Mapping[int, int]],
) -> dict[str, list[str]]:
    """Return the command (as words) that serves target and heads, for each engine that is a server.

    `drafts` are measured chain lengths by engine and concurrent requests.
    """
    return {
        engine: make(str(folder), published, facts, drafts.get(engine, {1: usual_drafts(published)}))
        for engine in engines
        if (make := KNOWN_ENGINES[engine].command) is not None
    }


def usual_drafts(published: Published) -> int:
    """Return the default chain length: 3, since later drafts are seldom accepted, or all tokens of one forward."""
    one_forward = {*BLOCKS, Layout.MEDUSA, Layout.PEAGLE}
    return published.steps if published.layout in one_forward else min(3, published.steps)


def drafts_to_try(published: Published, usual: Sequence[int]) -> list[int]:
    """Return the numbers of drafts to measure: the usual ones up to the heads' steps, and all of one pass."""
    one_pass = {published.steps} if published.layout in {*BLOCKS, Layout.PEAGLE} else set()
    return sorted({count for count in usual if count <= published.steps} | one_pass)
