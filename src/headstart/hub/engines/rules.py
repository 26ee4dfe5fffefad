"""What vLLM, SGLang and speculators make of a folder: which keys and tensors they read, ignore, or fill with noise.

Read in vLLM 0.32, SGLang of mid-2026 and speculators 0.9. vLLM stops at unknown tensors and leaves missing ones random
without a word; SGLang passes over both. Of block drafters vLLM reads neither `block_size` nor the order of the layer
ids: blocks are as long as it is asked to draft, and the layers' outputs come in the order of the layers.

What headstart itself cannot read is refused by `headstart.hub.engines.reading`, and found here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headstart.heads.exchange.published import BLOCKS, EMBEDDINGS, LM_HEAD, Layout, Published, digest
from headstart.hub.engines.base import Faults, Written
from headstart.hub.engines.checkpoint import CONFIG, Checkpoint
from headstart.hub.engines.reading import (
    DFLASH,
    DSPARK,
    are_layers,
    block_setting,
    draft_ids,
    for_sglang,
    kind_of_map,
    layout_of,
    proposed_steps,
    read_published,
    samples_from_anchor,
    settings_of,
)
from headstart.hub.target_facts import TargetFacts

_AGAIN = "Export the heads again, or take another checkpoint."
_WRITE = f"Write it into {CONFIG}."
_CORRECT = f"Correct it in {CONFIG}."
_WHICH = f"Correct the wrong one in {CONFIG}."
_TRAINED = f"Write the base that the heads were trained with into {CONFIG}."
_NO_MAPS = "Leave out d2t and t2d."
_WITHOUT = "Serve it with vLLM (--format vllm), or train without that."
_ROTARY = ("default", "linear", "llama3", "yarn", "dynamic")
_IDS = "eagle_aux_hidden_state_layer_ids"
_ARCHITECTURES = {
    ("vllm", Layout.EAGLE3): ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"),
    ("sglang", Layout.EAGLE3): ("LlamaForCausalLMEagle3",),
    ("vllm", Layout.EAGLE): ("LlamaForCausalLM", "EagleLlamaForCausalLM"),
    ("sglang", Layout.EAGLE): ("LlamaForCausalLMEagle",),
    ("vllm", Layout.DFLASH): (DFLASH,),
    ("sglang", Layout.DFLASH): (DFLASH,),
    ("vllm", Layout.DSPARK): (DSPARK, "DSparkDraftModel"),
}


def checkpoint_faults(checkpoint: Checkpoint, engine: str, facts: TargetFacts | None) -> Faults:
    """Everything an engine would get wrong with a folder of heads; a UserError where nothing else can be checked."""
    layout = layout_of(checkpoint)
    if layout is None:
        yield f"{checkpoint.folder} holds no draft heads.", "Give the folder of draft heads."
        return
    sound = True
    for fault in _faults(checkpoint, layout, engine, facts):
        sound = False
        yield fault
    if sound and (written := checkpoint.written) is not None:
        yield from unchanged(read_published(checkpoint), written, facts)


def _faults(checkpoint: Checkpoint, layout: Layout, engine: str, facts: TargetFacts | None) -> Faults:
    if layout is Layout.MEDUSA:
        yield from _medusa(checkpoint, engine, facts)
        return
    yield from _architecture(checkpoint, layout, engine)
    yield from _rotary(checkpoint.settings, layout)
    if (used := checkpoint.settings.get("hidden_act", "silu")) != "silu" and engine != "speculators":
        yield f"{engine} computes silu alone, and the MLP uses {used}.", "Train with heads.hidden_act=silu."
    written = checkpoint.written
    layers = facts.num_layers if facts is not None else (written.target if written else {}).get("num_layers")
    rules = {Layout.EAGLE3: _eagle3, Layout.EAGLE: _eagle}.get(layout, _block)
    yield from rules(checkpoint, engine, facts, layers if isinstance(layers, int) else None)


def _eagle3(checkpoint: Checkpoint, engine: str, facts: TargetFacts | None, layers: int | None) -> Faults:
    config, top = checkpoint.settings, checkpoint.config
    yield from _layer_ids(checkpoint, engine, layers)
    if engine == "sglang":
        if config.get("tie_word_embeddings", True) is not False:
            yield "SGLang takes the embeddings for the LM head unless tie_word_embeddings is false.", _WRITE
        if "draft_vocab_size" not in top:
            yield "SGLang needs draft_vocab_size, also for the whole vocabulary.", _WRITE
        if config.get("attention_bias"):
            yield "SGLang leaves out the biases of the attention.", "Serve it with vLLM."
    settings = settings_of(checkpoint, Layout.EAGLE3, facts)
    if engine == "sglang":
        for reason in _sglang_lacks(settings):
            yield f"SGLang {reason}, and would draft with other numbers than were trained.", _WITHOUT
    yield from _vocabulary_map(checkpoint, settings)
    settings = replace(settings, draft_ids_D=draft_ids(checkpoint, settings.vocab_size))
    wanted, shapes = settings.expected(), checkpoint.shapes
    if LM_HEAD not in shapes and settings.draft_ids_D is None and engine != "speculators":
        wanted.pop(LM_HEAD)  # the target's own
    beside = {
        EMBEDDINGS: (settings.vocab_size, settings.hidden_size),
        "t2d": (settings.vocab_size,),
        "d2t": (settings.draft_width,),
    }
    if engine == "speculators" and EMBEDDINGS not in shapes:
        yield "The classes of speculators fill embeddings that a file lacks with zeros.", _AGAIN
    if config.get("attention_bias") and engine != "sglang":
        beside |= {name: shape for name, shape in shapes.items() if name.endswith("_proj.bias")}
        if engine == "vllm" and not any(name.endswith("o_proj.bias") for name in shapes):
            yield "vLLM reads a bias of o_proj with attention_bias, and there is none: it stays random.", _AGAIN
    yield from _tensors(wanted, beside, shapes, engine)


def _sglang_lacks(published: Published) -> list[str]:
    """What SGLang does not do of EAGLE-3 heads."""
    names = {"aux_norms": "fc_norm"}
    settings = ("norm_before_residual", "norm_output", "aux_norms", "norm_before_fc")
    lacks = [f"does not know {names.get(name, name)}" for name in settings if getattr(published, name)]
    if published.num_layers != 1:
        lacks.append(f"has other layers after the first than vLLM, and there are {published.num_layers}")
    if len(published.aux_layers) != 3:
        lacks.append(f"fuses 3 layers of the target, not {len(published.aux_layers)}")
    return lacks


def _eagle(checkpoint: Checkpoint, engine: str, facts: TargetFacts | None, layers: int | None) -> Faults:
    settings, shapes = settings_of(checkpoint, Layout.EAGLE, facts), checkpoint.shapes
    beside: dict[str, tuple[int, ...]] = {EMBEDDINGS: (settings.vocab_size, settings.hidden_size)}
    wanted = settings.expected()
    if engine == "sglang":
        wanted["fc.bias"] = (settings.hidden_size,)
        if EMBEDDINGS in shapes and checkpoint.written is not None:
            yield "SGLang takes the target's embeddings in place of the heads' own.", "Serve it with vLLM."
    if engine == "vllm":
        for name in ("fc.bias", "layers.0.input_layernorm.weight"):
            if name in shapes:
                yield f"vLLM has no {name} in EAGLE-1 heads, and stops.", _AGAIN
                beside[name] = shapes[name]
    yield from _tensors(wanted, beside, shapes, engine)


def _medusa(checkpoint: Checkpoint, engine: str, facts: TargetFacts | None) -> Faults:
    config = checkpoint.config
    if engine != "vllm":
        yield f"{engine} has no Medusa heads.", "Serve them with vLLM up to 0.32 (--format vllm), or with headstart."
        return
    if config.get("model_type") != "medusa":
        yield f"vLLM knows Medusa heads by model_type medusa, and it is {config.get('model_type')!r}.", _AGAIN
    for key in config:
        if "num" in key and key not in ("num_heads", "num_hidden_layers") and ("heads" in key or "layers" in key):
            meant = "num_heads" if "heads" in key else "num_hidden_layers"
            if meant in config and config[meant] != config[key]:
                yield f"vLLM takes {key} for {meant}, and they differ.", f"Leave {key} out of {CONFIG}."
    settings = settings_of(checkpoint, Layout.MEDUSA, facts)
    asked = config.get("num_heads", config.get("medusa_num_heads"))
    if isinstance(asked, int) and asked > settings.steps:
        yield f"The config has {asked} heads and the file {settings.steps}: vLLM leaves the others random.", _AGAIN
    if any(name.endswith(".bias") for name in checkpoint.names) and config.get("medusa_fc_bias") is not True:
        yield "vLLM drops the blocks' biases unless medusa_fc_bias is true.", _WRITE
    if config.get("truncated_vocab_size") not in (None, config.get("vocab_size")):
        yield (
            "vLLM 0.32 stops at Medusa heads with a reduced vocabulary: it reads token_map and then misses it.",
            "Train with heads.draft_vocab_size=0 heads.shared_lm_head=true.",
        )
    if facts is not None and settings.vocab_size != facts.vocab_size:
        yield f"The heads draft from {settings.vocab_size} tokens, and {facts.name} has {facts.vocab_size}.", _AGAIN
    read_published(checkpoint, facts)


# -- block drafters ----------------------------------------------------------------------------------------------------


def _block(checkpoint: Checkpoint, engine: str, facts: TargetFacts | None, layers: int | None) -> Faults:
    config, layout = checkpoint.settings, layout_of(checkpoint)
    assert layout in BLOCKS, "the other arrangements have rules of their own"
    yield from _block_ids(config, engine, layers)
    yield from _block_attention(checkpoint, engine)
    settings = settings_of(checkpoint, layout, facts)
    if engine == "vllm" and layout is Layout.DSPARK and not settings.markov_rank:
        yield (
            "vLLM knows DSpark heads by their Markov head, and these have none (heads.markov_rank=0).",
            "Train dflash heads, or with a heads.markov_rank.",
        )
    anchor = samples_from_anchor(config, layout)
    drafts = settings.block_size - (0 if anchor else 1)
    if checkpoint.is_speculators and (asked := proposed_steps(config)) > drafts:
        yield (
            f"The config proposes {asked} draft tokens, and a block of {settings.block_size} has {drafts}: {engine} "
            "drafts past what was trained.",
            f"Write speculative_tokens = {drafts} into {CONFIG}.",
        )
    shapes = checkpoint.shapes
    for name, reader in (("d2t", "vLLM"), ("t2d", "llama.cpp's converter")):
        if shapes.pop(name, None) is not None:
            yield (
                f"There is a {name}, and the whole vocabulary is drafted: {reader} stops at it.",
                _NO_MAPS,
            )
    whole = (settings.vocab_size, settings.hidden_size)
    beside: dict[str, tuple[int, ...]] = {EMBEDDINGS: whole, LM_HEAD: whole}
    if engine == "speculators":
        beside |= {"verifier_lm_head.weight": whole, "verifier_norm.weight": (settings.hidden_size,)}
    yield from _tensors(settings.expected(), beside, shapes, engine)


def _block_ids(config: Mapping[str, Any], engine: str, layers: int | None) -> Faults:
    """`target_layer_ids` count layers' outputs from 0; EAGLE's ids and those of speculators count hidden states."""
    outputs = block_setting(config, "target_layer_ids")
    counted = {name: config[name] for name in ("aux_hidden_state_layer_ids", _IDS) if config.get(name) is not None}
    for name, ids in {"target_layer_ids": outputs or [], **counted}.items():
        if not are_layers(ids):
            yield f"{name} is {ids!r}.", f"Write a list of numbers into {CONFIG}."
            return
        if outputs and name in counted and list(ids) != [layer + 1 for layer in outputs]:
            yield (
                f"The layer ids disagree: {list(outputs)} in target_layer_ids and {list(ids)} in {name}, which should "
                "be one more each.",
                f"Correct the wrong ones in {CONFIG}.",
            )
    aux_layers = [layer + 1 for layer in outputs] if outputs else list(next(iter(counted.values()), []))
    if not aux_layers:
        yield (
            f"The config names no layers (target_layer_ids), and {engine} takes layers of its own choice.",
            f"Write those that the heads read into {CONFIG}, counted as outputs from 0.",
        )
        return
    noted = config.get("num_target_layers")
    if layers is not None and isinstance(noted, int) and noted != layers:
        yield f"num_target_layers is {noted}, and the target has {layers} layers.", _CORRECT
    layers = layers or (noted if isinstance(noted, int) else None)
    if layers and (max(aux_layers) > layers or min(aux_layers) < 1):
        outputs = [layer - 1 for layer in aux_layers]
        yield (
            f"target_layer_ids are {outputs}, and the target's outputs 0 to {layers - 1}: they look counted as EAGLE's "
            "ids, which are one more.",
            f"Subtract one from each in {CONFIG}.",
        )
    if sorted(set(aux_layers)) != aux_layers:
        yield (
            f"The layers {aux_layers} do not rise, and {engine} joins their outputs in the order of the layers.",
            "Train with rising heads.aux_layers.",
        )


def _block_attention(checkpoint: Checkpoint, engine: str) -> Faults:
    config = checkpoint.settings
    kinds, layers = config.get("layer_types") or [], config.get("num_hidden_layers")
    kinds = kinds if isinstance(kinds, list) else []
    sliding = [kind for kind in kinds if kind == "sliding_attention"]
    if kinds and isinstance(layers, int) and len(kinds) != layers:
        yield f"layer_types has {len(kinds)} entries for {layers} layers.", _CORRECT
    if sliding and engine == "vllm" and not checkpoint.is_speculators:
        if len(sliding) < len(kinds):
            yield "vLLM mixes sliding and full layers on GPUs alone (V2 model runner).", "Serve it on a GPU."
        if block_setting(config, "causal") is None and config.get("is_causal") is None:
            yield (
                "Sliding layers are causal in vLLM unless dflash_config.causal is false: slots do not see later ones.",
                f"Write dflash_config.causal into {CONFIG} as the heads were trained.",
            )
        if block_setting(config, "swa_window_size") is None and config.get("sliding_window") is None:
            yield "There are sliding layers and no sliding_window, and vLLM stops.", _WRITE
    if engine == "vllm" and checkpoint.is_speculators and config.get("sliding_window_non_causal") is False:
        yield (
            "sliding_window_non_causal is false, and vLLM 0.32 takes that for all layers: slots do not see later ones.",
            f"Write sliding_window_non_causal = true into {CONFIG}; without sliding layers it says nothing else.",
        )


# -- what several arrangements share -----------------------------------------------------------------------------------


def _architecture(checkpoint: Checkpoint, layout: Layout, engine: str) -> Faults:
    if engine == "speculators" or (engine == "vllm" and checkpoint.is_speculators):
        if not checkpoint.is_speculators:
            yield f"{CONFIG} has no speculators_model_type.", "Export with --format speculators."
        return
    if (engine, layout) not in _ARCHITECTURES:
        yield (
            "headstart knows of no SGLang that serves DSpark heads as it writes them.",
            "Serve them with llama.cpp (--format gguf) or vLLM, or train dflash heads.",
        )
        return
    known, given = _ARCHITECTURES[engine, layout], checkpoint.config.get("architectures")
    if not set(map(str, given if isinstance(given, list) else [])) & set(known):
        yield (
            f"{engine} knows such heads as {known[0]}, and architectures is {given!r}.",
            f"Correct it in {CONFIG}, or export with --format {engine}.",
        )
    model_type = checkpoint.config.get("model_type")
    if layout in BLOCKS and model_type != "qwen3":
        yield f"The layers of block drafters are Qwen3's for all targets, and model_type is {model_type!r}.", _CORRECT


def _rotary(config: Mapping[str, Any], layout: Layout) -> Faults:
    new, old = config.get("rope_parameters"), config.get("rope_theta")
    base = new.get("rope_theta") if isinstance(new, Mapping) else None
    if base is None and old is None:
        usual = "one of their own (vLLM 1000000)" if layout in BLOCKS else "10000"
        yield f"The config says no rope_theta, and engines then take {usual}.", _TRAINED
    elif base is not None and old is not None and base != old:
        yield f"rope_theta is {old} at the top and {base} in rope_parameters: engines read one of them.", _WHICH
    older = config.get("rope_scaling")
    kind = (new if isinstance(new, Mapping) else older or {}).get("rope_type", "default")
    if isinstance(new, Mapping) and (kind != "default") != bool(older):
        yield f"rope_parameters are of the kind {kind}, and rope_scaling is not: engines read one of them.", _WHICH
    if kind not in _ROTARY:
        yield f"No engine is known to turn heads by {kind} positions.", _AGAIN


def _layer_ids(checkpoint: Checkpoint, engine: str, layers: int | None) -> Faults:
    top, nested = checkpoint.config.get(_IDS), for_sglang(checkpoint.config).get(_IDS)
    if top and nested and [layer + 1 for layer in nested] != list(top):
        yield (
            f"The layer ids disagree: {list(top)} at the top (vLLM, llama.cpp) and {list(nested)} in eagle_config "
            "(SGLang), which should be one less each.",
            f"Correct the wrong ones in {CONFIG}.",
        )
    if engine == "sglang" and top and not nested:
        yield (
            f"SGLang reads the layer ids in eagle_config alone, and takes the usual ones instead of {list(top)}.",
            f"Write eagle_config.{_IDS} = {[layer - 1 for layer in top]} into {CONFIG}.",
        )
    if engine == "vllm" and nested and not top:
        yield (
            f"vLLM takes the nested layer ids {list(nested)} as they are, one layer before those that SGLang reads.",
            f"Write {_IDS} = {[layer + 1 for layer in nested]} at the top of {CONFIG}.",
        )
    if not (ids := top or nested):
        return
    count = checkpoint.config.get("num_aux_hidden_states") or len(nested or [0] * 3)
    if engine == "vllm" and len(ids) != count and not checkpoint.is_speculators:
        yield (
            f"vLLM fuses {count} layers, and there are {len(ids)} layer ids.",
            f"Write num_aux_hidden_states = {len(ids)} into {CONFIG}.",
        )
    if engine == "vllm" and checkpoint.is_speculators and len(ids) != 3:
        yield (
            f"vLLM fuses 3 layers of heads in the speculators format, and these read {len(ids)}.",
            "Export with --format vllm.",
        )
    aux_layers = list(top or [layer + 1 for layer in ids])
    if layers is not None:
        deepest = layers if engine in ("vllm", "speculators") else layers - 1
        if max(aux_layers) > deepest or min(aux_layers) < 1:
            yield (
                f"{engine} cannot read the layers {aux_layers} of a target with {layers}: {deepest} is the deepest.",
                "Train with other heads.aux_layers.",
            )


def _vocabulary_map(checkpoint: Checkpoint, settings: Published) -> Faults:
    """`d2t` is there, and holds offsets."""
    shapes = checkpoint.shapes
    width = checkpoint.settings.get("draft_vocab_size") or settings.vocab_size
    if "d2t" not in shapes:
        if width != settings.vocab_size or shapes.get(LM_HEAD, (settings.vocab_size,))[0] != settings.vocab_size:
            yield (
                f"The heads draft from {width} tokens and there is no d2t: engines take draft token i for token i.",
                "Export the heads again with their d2t.",
            )
        return
    given_D = checkpoint.read("d2t")
    if len(given_D) == settings.vocab_size:
        yield "There is a d2t, and the whole vocabulary is drafted: vLLM stops at it.", _NO_MAPS
    kind = kind_of_map(given_D, checkpoint.read("t2d") if "t2d" in shapes else None, settings.vocab_size)
    if kind != "offsets":
        held = "token ids" if kind == "ids" else "no tokens of the target"
        yield (
            f"d2t holds {held}, and engines read offsets (token = i + d2t[i]).",
            "Subtract each entry's place from it.",
        )
    if len(given_D) != width:
        yield f"d2t has {len(given_D)} entries, and draft_vocab_size is {width}.", f"Correct {CONFIG}."
    if LM_HEAD not in shapes and len(given_D) != settings.vocab_size:
        yield "There is a d2t and no lm_head.weight of the reduced vocabulary.", _AGAIN


def _tensors(
    wanted: Mapping[str, tuple[int, ...]],
    beside: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    engine: str,
) -> Faults:
    """Tensors that an engine needs, those that may lie beside them, and those of the folder."""
    for name, shape in wanted.items():
        if name not in shapes:
            does = "only warns" if engine == "speculators" else "leaves it random without a word"
            yield f"The tensor {name} is missing, and {engine} {does}.", _AGAIN
        elif shapes[name] != shape:
            yield f"The tensor {name} is {list(shapes[name])}, and its config asks for {list(shape)}.", _AGAIN
    for name in sorted(set(shapes) - set(wanted) - set(beside)):
        does = "stops at it" if engine == "vllm" else "ignores it"
        yield f"{engine} has no tensor {name} in such heads, and {does}.", _AGAIN
    for name in sorted(set(beside) & set(shapes)):
        if shapes[name] != beside[name]:
            yield f"The tensor {name} is {list(shapes[name])}, and {list(beside[name])} is expected.", _AGAIN


def unchanged(published: Published, written: Written, facts: TargetFacts | None) -> Faults:
    """Whether a file of ours still holds the heads that it was written from, and is for this target."""
    if digest(published) != written.digest:
        yield (
            "Numbers or settings are not those that headstart wrote: layer ids, rotary base, norms, d2t or weights "
            "were changed.",
            "Export the heads again.",
        )
    theirs = written.target.get("fingerprint")
    if facts is not None and facts.fingerprint and theirs and theirs != facts.fingerprint:
        yield (
            f"The heads are for {written.target.get('name')}, and {facts.name} is another model.",
            "Serve them with the target that they were trained on.",
        )
