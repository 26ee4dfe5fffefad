"""Published layouts of draft heads: the interchange format between families and serving engines.

Tensors by layout, under the field's common names:

    eagle3  `fc.weight` [E, aux layers * E]; `layers.0.input_layernorm.weight` (of the embedding) and
            `layers.0.hidden_norm.weight` (of the fused state); `layers.{i}.self_attn.{q,k,v,o}_proj.weight`, the first
            layer's q, k and v reading [embedding; state]; `layers.{i}.post_attention_layernorm.weight`,
            `layers.{i}.mlp.{gate,up,down}_proj.weight`; `norm.weight`; `lm_head.weight` [D, E]; with `aux_norms`
            `fc_norm.{number}.weight`; with `norm_before_fc` one `input_norm.weight` [aux layers * E]; with `qk_norm`
            `layers.{i}.self_attn.{q,k}_norm.weight` [d]
    peagle  the same, with `mask_hidden` [1, 1, aux layers * E]; `embed_tokens.weight` where it is not the target's own
    eagle   `fc.weight` [E, 2 * E], embedding first, and `fc.bias`; `layers.0.*` as above without the two norms of the
            input; `embed_tokens.weight` where it is not the target's own
    medusa  `blocks.{head}.layers.{block}.{weight,bias}`, and `lm_heads.{head}.weight` [D, E], or one
            `lm_head.weight` for all heads
    dflash  `fc.weight` [E, aux layers * E] and `hidden_norm.weight`; `layers.{i}.*` as above, each with an
            `input_layernorm.weight` and `self_attn.{q,k}_norm.weight` [d]; `norm.weight`; embeddings and LM head are
            the target's
    dspark  the same, with `markov_head.markov_w1.weight` and `markov_head.markov_w2.weight` [V, r], and with
            `confidence` `confidence_head.proj.weight` [1, E + r] and `confidence_head.proj.bias` [1]
    dflash2 dflash, with `layers.{i}.{attention,mlp}_conv.base_kernel` [2, taps, E] and
            `layers.{i}.{attention,mlp}_conv.kernel_projection.weight` [2 * taps * groups, E];
            `candidate_selector.{predecessor,successor}_codebook` [V, r] and
            `candidate_selector.hidden_projection.weight` [r, E]

Shape suffixes: D draft vocabulary, E hidden size, V vocabulary, d size of an attention head, r rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import product
from typing import Any

import torch
from torch import Tensor

from headstart.errors import UserError


class Layout(StrEnum):
    EAGLE3 = "eagle3"
    EAGLE = "eagle"
    PEAGLE = "peagle"
    MEDUSA = "medusa"
    DFLASH = "dflash"
    DSPARK = "dspark"
    DFLASH2 = "dflash2"


EMBEDDINGS = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"
MASK_HIDDEN = "mask_hidden"
"""P-EAGLE's state of mask entries."""
MARKOV_EMBEDDING, MARKOV_LM_HEAD = (f"markov_head.markov_w{number}.weight" for number in (1, 2))
"""DSpark's Markov head."""
PREDECESSORS, SUCCESSORS = (f"candidate_selector.{name}_codebook" for name in ("predecessor", "successor"))
SELECTOR = "candidate_selector.hidden_projection.weight"
"""DFlash 2's pairwise scores."""

BLOCKS = frozenset({Layout.DFLASH, Layout.DFLASH2, Layout.DSPARK})
"""Layouts that draft a block in one pass, through the target's LM head."""
FUSED = frozenset({Layout.EAGLE3, Layout.PEAGLE})
"""Layouts of EAGLE-3's layers, whose first one reads fused states."""


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a draft decoder layer, named as in transformers' Llama."""

    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int


@dataclass(frozen=True)
class Published:
    """Heads in one of the published layouts.

    Attributes:
        steps: number of draft steps in training.
        tensors: by layout, see the module's docstring.
        draft_ids_D: target token id of each draft token; None for the whole vocabulary.
        num_layers: decoder layers, or blocks of a Medusa head.
        aux_layers: fused indices of transformers' `hidden_states`; empty for the state after the final norm.
        norm_before_residual: whether the residual stream of the first layer starts after the hidden norm.
        norm_output: whether the final norm applies to the feedback too.
        qk_norm: whether EAGLE-3's layers norm queries and keys per head; block layers always do.
        aux_norms, norm_before_fc: whether norms precede the fusion, one per aux state or one for all.
        normed_embeddings: whether `embed_tokens.weight` holds the target's embeddings, normalised.
        block_size: inputs of a block: the root, then `mask_token_id`. The first slot drafts in DSpark alone. 0 without
            blocks.
        mask_token_id: token of inputs that stand for tokens not drafted yet, in blocks and P-EAGLE.
        sliding_window: number of visible tokens of a block slot, itself included; 0 for all.
        full_layers: layers exempt from the window.
        causal: whether slots do not see later ones, in the layers with a sliding window if there are any, else in all.
        markov_rank: rank of the map from each drafted token to the next one's logits.
        confidence: whether there is a confidence head.
        conv_kernel_size, conv_group_size, selector_rank, selector_top_k: sizes of DFlash 2.
        output_multiplier, final_logit_softcapping: scale and cap of the target's logits, for DFlash 2.
    """

    layout: Layout
    hidden_size: int
    vocab_size: int
    steps: int
    tensors: Mapping[str, Tensor]
    draft_ids_D: Tensor | None = None
    layer: LayerSizes | None = None
    num_layers: int = 1
    aux_layers: tuple[int, ...] = ()
    norm_before_residual: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    aux_norms: bool = False
    norm_before_fc: bool = False
    normed_embeddings: bool = False
    block_size: int = 0
    mask_token_id: int = -1
    sliding_window: int = 0
    full_layers: tuple[int, ...] = ()
    causal: bool = False
    markov_rank: int = 0
    confidence: bool = False
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0

    @property
    def fed_back(self) -> Published | None:
        """The EAGLE-3 heads that an engine without parallel drafting makes of P-EAGLE heads; None for other layouts."""
        if self.layout is not Layout.PEAGLE:
            return None
        tensors = {name: tensor for name, tensor in self.tensors.items() if name != MASK_HIDDEN}
        return replace(self, layout=Layout.EAGLE3, mask_token_id=-1, tensors=tensors)

    @property
    def draft_width(self) -> int:
        return self.vocab_size if self.draft_ids_D is None else len(self.draft_ids_D)

    @property
    def sliding(self) -> list[bool]:
        return [bool(self.sliding_window) and number not in self.full_layers for number in range(self.num_layers)]

    @property
    def causal_layers(self) -> list[bool]:
        return [self.causal and slides == bool(self.sliding_window) for slides in self.sliding]

    @property
    def settings(self) -> dict[str, Any]:
        """All settings that change the output."""
        of_layout = _OF_BLOCKS if self.layout in BLOCKS else ("mask_token_id",) if self.layout is Layout.PEAGLE else ()
        names = (*_SETTINGS, *of_layout)
        given = {name: getattr(self, name) for name in names}
        return {**given, "layout": str(self.layout), "layer": None if self.layer is None else asdict(self.layer)}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Published:
        return replace(self, tensors=tensors)

    def with_context(self, tokens: int) -> Published:
        """Raise the longest context to at least `tokens`. Rotary angles do not depend on it, except for yarn's, which
        keep the original one."""
        if self.layer is None or self.layer.max_position_embeddings >= tokens:
            return self
        rope = self.layer.rope_parameters
        if rope.get("rope_type") == "yarn":
            rope = {"original_max_position_embeddings": self.layer.max_position_embeddings, **rope}
        return replace(self, layer=replace(self.layer, rope_parameters=rope, max_position_embeddings=tokens))

    def in_order(self) -> Published:
        """Sort the draft vocabulary by token id."""
        if self.draft_ids_D is None:
            return self
        order_D = self.draft_ids_D.argsort()
        moved = {name: tensor[order_D] for name, tensor in self.tensors.items() if name.startswith("lm_head")}
        return replace(self, draft_ids_D=self.draft_ids_D[order_D], tensors={**self.tensors, **moved})

    @property
    def not_finite(self) -> list[str]:
        return [name for name, tensor in self.tensors.items() if not tensor.isfinite().all()]

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the required tensors."""
        size, count = self.hidden_size, len(self.aux_layers)
        if self.layout is Layout.MEDUSA:
            heads = range(self.steps)
            blocks = (f"blocks.{head}.layers.{block}.weight" for head in heads for block in range(self.num_layers))
            lm_heads = [LM_HEAD] if LM_HEAD in self.tensors else [f"lm_heads.{head}.weight" for head in heads]
            return {**dict.fromkeys(blocks, (size, size)), **dict.fromkeys(lm_heads, (self.draft_width, size))}
        layers: dict[str, tuple[int, ...]] = {}
        for number in range(self.num_layers):
            layers |= self._of_layer(number)
        if self.layout is Layout.EAGLE:
            return {"fc.weight": (size, 2 * size), **layers}
        layers |= {f"layers.{number}.input_layernorm.weight": (size,) for number in range(self.num_layers)}
        fused = {"fc.weight": (size, count * size), **layers, "norm.weight": (size,)}
        if self.layout in BLOCKS:
            if self.layout is Layout.DFLASH2:
                taps, groups = self.conv_kernel_size, size // self.conv_group_size
                for number, part in product(range(self.num_layers), ("attention", "mlp")):
                    fused[f"layers.{number}.{part}_conv.base_kernel"] = (2, taps, size)
                    fused[f"layers.{number}.{part}_conv.kernel_projection.weight"] = (2 * taps * groups, size)
                fused |= dict.fromkeys((PREDECESSORS, SUCCESSORS), (self.vocab_size, self.selector_rank))
                fused[SELECTOR] = (self.selector_rank, size)
            if rank := self.markov_rank:
                fused |= dict.fromkeys((MARKOV_EMBEDDING, MARKOV_LM_HEAD), (self.vocab_size, rank))
            if self.confidence:
                fused |= {"confidence_head.proj.weight": (1, size + rank), "confidence_head.proj.bias": (1,)}
            return {**fused, "hidden_norm.weight": (size,)}
        if self.aux_norms:
            fused |= {f"fc_norm.{number}.weight": (size,) for number in range(count)}
        if self.norm_before_fc:
            fused["input_norm.weight"] = (count * size,)
        if self.layout is Layout.PEAGLE:
            fused[MASK_HIDDEN] = (1, 1, count * size)
        return {**fused, "layers.0.hidden_norm.weight": (size,), LM_HEAD: (self.draft_width, size)}

    def _of_layer(self, number: int) -> dict[str, tuple[int, ...]]:
        assert self.layer is not None, "these heads have decoder layers"
        size, inner, width = self.hidden_size, self.layer.intermediate_size, self.layer.head_dim
        inputs = 2 * size if number == 0 and self.layout in FUSED else size
        queries, keys = self.layer.num_attention_heads * width, self.layer.num_key_value_heads * width
        norms = dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (width,))
        shapes: dict[str, tuple[int, ...]] = {
            **(norms if self.qk_norm or self.layout in BLOCKS else {}),
            "self_attn.q_proj": (queries, inputs),
            "self_attn.k_proj": (keys, inputs),
            "self_attn.v_proj": (keys, inputs),
            "self_attn.o_proj": (size, queries),
            "post_attention_layernorm": (size,),
            "mlp.gate_proj": (inner, size),
            "mlp.up_proj": (inner, size),
            "mlp.down_proj": (size, inner),
        }
        return {f"layers.{number}.{name}.weight": shape for name, shape in shapes.items()}


_BLOCK_SIZES = ("block_size", "mask_token_id", "sliding_window", "full_layers", "causal", "markov_rank", "confidence")
DFLASH2_SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
DFLASH2_LOGITS = ("output_multiplier", "final_logit_softcapping")
_OF_BLOCKS = (*_BLOCK_SIZES, *DFLASH2_SIZES, *DFLASH2_LOGITS)
_LAYERS = ("num_layers", "aux_layers", "norm_before_residual", "aux_norms", "qk_norm")
SHARED = (*_LAYERS, *_OF_BLOCKS)
"""Fields that family configs have under the same name."""
_SETTINGS = ("hidden_size", "vocab_size", *_LAYERS, "norm_output", "norm_before_fc")
_ROUNDED = 0.01
"""Upper bound on the relative error of rounding to bfloat16."""


def copy_to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor if tensor.is_meta else tensor.detach().cpu().clone().contiguous()
        for name, tensor in tensors.items()
    }


def nearly_equal(published_VE: Tensor | None, own_VE: Tensor) -> bool:
    """Whether a checkpoint has no such embeddings or LM head, or equal ones up to bfloat16 rounding."""
    if published_VE is None:
        return True
    if published_VE.shape != own_VE.shape:
        return False
    own_VE = own_VE.detach().float().cpu()
    return bool((published_VE.float() - own_VE).abs().mean() <= _ROUNDED * own_VE.abs().mean())


def check_embeddings(published: Published, own_VE: Tensor) -> None:
    """Raise a UserError if a checkpoint has token embeddings other than the target's."""
    if not nearly_equal(published.tensors.get(EMBEDDINGS), own_VE):
        raise embeddings_error()


def embeddings_error() -> UserError:
    return UserError(
        "The checkpoint has token embeddings of its own, which are not the target's; heads of headstart read the "
        "target's.",
        "Name the target that they were trained on with --target, or take another checkpoint.",
    )


def digest(published: Published) -> str:
    """Hash settings and tensors (in float32), without copies of the target's embeddings and LM head."""
    hashed = hashlib.sha256(json.dumps(published.settings, sort_keys=True, default=list).encode())
    ids_D = published.draft_ids_D
    tensors = dict(published.tensors)
    if published.layout is Layout.EAGLE3 or published.layout in BLOCKS:
        tensors.pop(EMBEDDINGS, None)
    if published.layout in BLOCKS:
        tensors.pop(LM_HEAD, None)
    if ids_D is not None:
        tensors["draft_ids"] = ids_D
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu()
        tensor = tensor.float() if tensor.is_floating_point() else tensor.to(torch.int64)
        hashed.update(f"{name} {tuple(tensor.shape)}".encode())
        hashed.update(tensor.contiguous().numpy().tobytes())
    return hashed.hexdigest()[:32]
