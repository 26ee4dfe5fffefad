"""Problems that engines have with heads and their folders: keys and tensors that they reject, ignore or leave random.

Problems of one engine are in its `EngineTraits` (`known_engines.py`), heads that headstart cannot read in `parsing.py`.
vLLM stops at unknown tensors and silently leaves missing ones random; SGLang ignores both. For block drafters vLLM
ignores `block_size` (blocks have the requested number of drafts) and joins layers in ascending order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headstart.heads.exchange.published import BLOCKS, FUSED, LM_HEAD, Layout, Published, digest
from headstart.hub.engines.base import AGAIN, Faults, Note
from headstart.hub.engines.checkpoint import AUX_IDS, CONFIG, CORRECT, WRITE, Checkpoint
from headstart.hub.engines.known_engines import KNOWN_ENGINES, EngineTraits, tensor_faults
from headstart.hub.engines.parsing import (
    block_setting,
    draft_ids,
    kind_of_map,
    optional_tensors,
    proposed_steps,
    read_published,
    samples_from_anchor,
    settings_of,
)
from headstart.hub.target_facts import TargetFacts

_NO_MAPS = "Leave out d2t and t2d."
_WITHOUT = "Serve it with vLLM (--format vllm), or train without that."
_IN_WORDS = {
    "aux_norms": "fc_norm (heads.aux_norms)",
    "norm_output": "norm_output (heads.feedback=post_norm)",
    "qk_norm": "norms of queries and keys (heads.qk_norm)",
}


# -- limits of engines, whatever the file ------------------------------------------------------------------------------


def engine_limits(settings: Published, traits: EngineTraits, facts: TargetFacts | None, note: Note | None) -> Faults:
    """Report settings that an engine does not support; the target's depth comes from `facts` or our note."""
    engine, layer, aux_layers = traits.name, settings.layer, list(settings.aux_layers)
    if aux_layers and facts is not None and facts.model_type in traits.without_hooks:
        problem = f"{engine} passes no hidden states of {facts.model_type} targets to heads."
        yield problem, "Decode with headstart, or train medusa heads for it."
    if layer is not None:
        if layer.hidden_act != "silu" and traits.only_silu:
            yield f"{engine} supports only silu, not {layer.hidden_act}.", "Train with heads.hidden_act=silu."
        kind = layer.rope_parameters.get("rope_type", "default")
        if kind not in traits.rotary:
            yield f"{engine} is not known to support {kind} RoPE.", AGAIN
        heads = layer.num_attention_heads
        if traits.divides_heads and settings.layout not in BLOCKS and settings.hidden_size % heads:
            yield (
                f"The hidden size {settings.hidden_size} is not a multiple of the {heads} attention heads, which "
                f"{engine} requires.",
                "Serve with llama.cpp (--format gguf), or train with a heads.num_attention_heads that divides it.",
            )
    if facts is not None and settings.vocab_size != facts.vocab_size:
        yield f"The heads' vocabulary has {settings.vocab_size} tokens, {facts.name}'s {facts.vocab_size}.", AGAIN
    layers = facts.num_layers if facts is not None else int((note.target if note else {}).get("num_layers", 0))
    deepest = layers - (settings.layout in traits.last_layer_unread)
    if layers and aux_layers and not 1 <= min(aux_layers) <= max(aux_layers) <= deepest:
        yield (
            f"{engine} cannot read layers {aux_layers} of a target with {layers} layers: {deepest} is the deepest.",
            f"Train with other heads.aux_layers, or correct off-by-one ids in {CONFIG}.",
        )
    if settings.layout in BLOCKS:
        if sorted(set(aux_layers)) != aux_layers:
            problem = f"The layers {aux_layers} are not ascending, as {engine} requires."
            yield problem, "Train with ascending heads.aux_layers."
        if settings.layout is Layout.DSPARK and not settings.markov_rank and traits.needs_markov:
            problem = f"{engine} recognises DSpark heads by a Markov head, which these lack (heads.markov_rank=0)."
            yield problem, "Train dflash heads, or set heads.markov_rank above 0."
    if settings.layout is Layout.EAGLE3:
        for name in traits.ignored:
            if getattr(settings, name):
                yield f"{engine} does not know {_IN_WORDS.get(name, name)}, and would silently ignore it.", _WITHOUT
        if settings.num_layers != 1 and traits.ignored:
            yield f"{engine} runs one layer of such heads, and these have {settings.num_layers} layers.", _WITHOUT
        if len(aux_layers) != 3 and traits.ignored:
            yield f"{engine} fuses 3 layers of the target, not {len(aux_layers)}.", _WITHOUT


def changed(published: Published, note: Note, facts: TargetFacts | None) -> Faults:
    """Report a file of ours that differs from its note: other heads or another target."""
    if digest(published) != note.digest:
        problem = "The file changed since headstart wrote it: layer ids, rotary base, norms, d2t or weights."
        yield problem, "Export the heads again."
    theirs = note.target.get("fingerprint")
    if facts is not None and facts.fingerprint and theirs and theirs != facts.fingerprint:
        problem = f"The heads are for {note.target.get('name')}; {facts.name} is another model."
        yield problem, "Serve them with the target they were trained on."


# -- folders -----------------------------------------------------------------------------------------------------------


def checkpoint_faults(checkpoint: Checkpoint, engine: str, facts: TargetFacts | None) -> Faults:
    """Report all problems an engine has with a folder of heads. Raises UserError if the checks cannot continue."""
    is_sound = True
    for fault in _config_and_tensor_faults(checkpoint, KNOWN_ENGINES[engine], facts):
        is_sound = False
        yield fault
    if is_sound and (note := checkpoint.note) is not None:
        yield from changed(read_published(checkpoint), note, facts)


def _config_and_tensor_faults(checkpoint: Checkpoint, traits: EngineTraits, facts: TargetFacts | None) -> Faults:
    settings = settings_of(checkpoint, facts)  # first: raises for heads that headstart refuses
    layout = settings.layout
    yield from _architecture(checkpoint, layout, traits)
    yield from engine_limits(settings, traits, facts, checkpoint.note)
    if settings.layer is not None:
        yield from _rotary(checkpoint.settings)
        yield from short_context(settings, facts)
    if layout in FUSED:
        yield from _eagle3(checkpoint, settings)
    if layout in traits.faults:
        yield from traits.faults[layout](checkpoint, settings)
    settings = replace(settings, draft_ids_D=draft_ids(checkpoint, settings.vocab_size))
    required, shapes = settings.expected(), checkpoint.shapes
    optional = optional_tensors(settings, shapes)
    match layout:
        case Layout.EAGLE3 | Layout.PEAGLE:
            optional |= {"t2d": (settings.vocab_size,), "d2t": (settings.draft_width,)}
            if checkpoint.settings.get("attention_bias"):
                optional |= {name: shape for name, shape in shapes.items() if name.endswith("_proj.bias")}
            if LM_HEAD not in shapes and settings.draft_ids_D is None and traits.shares_lm_head:
                required.pop(LM_HEAD)
        case Layout.EAGLE:
            bias = optional.pop("fc.bias")
            if traits.has_fc_bias:
                required["fc.bias"] = bias
        case Layout.MEDUSA:
            optional["token_map"] = (settings.draft_width,)
        case _:
            yield from _block(checkpoint, settings, traits.name)
            for name in ("d2t", "t2d"):
                shapes.pop(name, None)
            if traits.has_verifier:
                optional |= {
                    "verifier_lm_head.weight": optional[LM_HEAD],
                    "verifier_norm.weight": (settings.hidden_size,),
                }
    yield from tensor_faults(required, optional, shapes, traits)


def _block(checkpoint: Checkpoint, settings: Published, engine: str) -> Faults:
    """Check block drafters. `target_layer_ids` count layer outputs from 0; EAGLE's and speculators' ids from 1."""
    config = checkpoint.settings
    for name in ("aux_hidden_state_layer_ids", AUX_IDS):
        if config.get(name) not in (None, list(settings.aux_layers)):
            yield (
                f"The layer ids disagree: {config[name]} in {name}, {list(settings.aux_layers)} elsewhere; "
                "target_layer_ids should be one less each.",
                CORRECT,
            )
    if settings.sliding_window and not (config.get("use_sliding_window") or block_setting(config, "swa_window_size")):
        yield f"{engine} stops: Qwen3's config drops sliding_window unless use_sliding_window is true.", WRITE
    drafts = settings.block_size - (0 if samples_from_anchor(config, settings.layout) else 1)
    if checkpoint.is_speculators and (proposed := proposed_steps(config)) > drafts:
        problem = f"The config proposes {proposed} draft tokens, and a block of {settings.block_size} has {drafts}."
        yield problem, f"Write speculative_tokens = {drafts} into {CONFIG}."
    for name, reader in (("d2t", "vLLM"), ("t2d", "llama.cpp's converter")):
        if name in checkpoint.names:
            yield f"The file has a {name}, although the heads draft all tokens: {reader} stops at it.", _NO_MAPS


def _architecture(checkpoint: Checkpoint, layout: Layout, traits: EngineTraits) -> Faults:
    engine, known, config = traits.name, traits.architectures.get(layout, ()), checkpoint.config
    if layout is Layout.MEDUSA:
        if not known:
            yield f"{engine} does not serve Medusa heads.", "Use vLLM up to 0.32 (--format vllm) or headstart."
        return
    if checkpoint.is_speculators and traits.reads_speculators:
        return
    if not traits.architectures:
        yield f"{CONFIG} has no speculators_model_type.", "Export with --format speculators."
    elif not known:
        yield f"{engine} does not serve {layout} heads.", "Serve them with another engine."
    elif not checkpoint.architectures & set(known):
        problem = f"{engine} expects architectures = {[known[0]]}, not {config.get('architectures')!r}."
        yield problem, f"Correct it in {CONFIG}, or export with --format {engine}."
    if known and layout in BLOCKS and (kind := config.get("model_type")) != "qwen3":
        yield f"Block drafters have Qwen3 layers for every target, and model_type is {kind!r}.", CORRECT


def _rotary(config: Mapping[str, Any]) -> Faults:
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if not isinstance(new, Mapping):
        return
    sections = (new, *(inner for inner in new.values() if isinstance(inner, Mapping)))
    if any(section.get("rope_type", "default") != "default" for section in sections) != bool(old):
        yield "rope_parameters and rope_scaling disagree, and each engine reads only one.", CORRECT


def short_context(settings: Published, facts: TargetFacts | None) -> Faults:
    """Report a context shorter than the target's."""
    layer = settings.layer
    if layer is not None and facts is not None and layer.max_position_embeddings < facts.context:
        yield (
            f"The heads' context is {layer.max_position_embeddings} tokens, and the context of {facts.name} is "
            f"{facts.context}: beyond it engines stop, or accept few drafts.",
            "Import and export them with headstart, which extends max_position_embeddings.",
        )


def _eagle3(checkpoint: Checkpoint, settings: Published) -> Faults:
    """Check the layer ids and `d2t`, which must hold offsets, and only for a reduced vocabulary."""
    top, nested = checkpoint.aux_ids
    if top and nested and [layer + 1 for layer in nested] != list(top):
        ids = f"{list(top)} at the top (vLLM, llama.cpp), {list(nested)} in eagle_config (SGLang)"
        yield f"The layer ids disagree: {ids}, which should be one less each.", CORRECT
    names = checkpoint.names
    if "d2t" not in names:
        return
    given_D = checkpoint.read("d2t")
    width = checkpoint.settings.get("draft_vocab_size") or settings.vocab_size
    if len(given_D) == settings.vocab_size:
        yield "The file has a d2t, although the heads draft all tokens: vLLM stops at it.", _NO_MAPS
    if kind_of_map(given_D, checkpoint.read("t2d") if "t2d" in names else None, settings.vocab_size) == "ids":
        yield "d2t holds token ids; engines read offsets (token = i + d2t[i]).", "Subtract its index from each entry."
    if len(given_D) != width:
        yield f"d2t has {len(given_D)} entries, and draft_vocab_size is {width}.", CORRECT
