"""MTP heads against a plain reading of the published formula, and what they refuse."""

from __future__ import annotations

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from headstart.heads.mtp import MtpHead
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from tests.heads.test_contract import batch_of, build, shake

TEXT = [3, 9, 14, 27, 33, 8, 40, 12, 55, 6]


@torch.no_grad()
def test_the_first_step_computes_the_published_formula(target: Target) -> None:
    """h' = M [RMSNorm(Emb(t_i+1)); RMSNorm(h_i)], then a decoder layer and the LM head, with transformers' own layer
    and rotary positions (DeepSeek-V3, equations 21 to 23; the embedding comes first in the released weights)."""
    heads = shake(build("mtp", target)).eval()
    assert isinstance(heads, MtpHead)
    config = LlamaConfig(**target.config.to_dict())
    config._attn_implementation = "sdpa"
    layer, module = LlamaDecoderLayer(config, 0), heads.module
    layer.load_state_dict({name.removeprefix("layers.0."): x for name, x in module.by_published_name(0).items()})

    def rms(x: torch.Tensor, norm: torch.nn.RMSNorm) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * norm.weight

    length = len(TEXT) - 1
    state_1TE = target.hidden_states([TEXT], [FINAL])[0][FINAL][None, :length]
    embedded_1TE = target.embedding_weight[torch.tensor([TEXT[1:]])]
    joined = torch.cat([rms(embedded_1TE, module.enorm), rms(state_1TE, module.hnorm)], -1) @ module.eh_proj.weight.T
    positions_1T = torch.arange(length)[None]
    rotary = LlamaRotaryEmbedding(config)(joined, positions_1T)
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    out = layer(joined, attention_mask=mask, position_ids=positions_1T, position_embeddings=rotary)
    wanted_TV = target.lm_head(rms(out[0] if isinstance(out, tuple) else out, module.norm))[0]
    step = next(iter(heads.unroll(batch_of(target, heads, [TEXT], prompt=1))))
    assert step.origin_M.tolist() == list(range(length - 1))
    wanted_MV = wanted_TV[step.origin_M]
    torch.testing.assert_close(step.logits_MD, wanted_MV, rtol=1e-5, atol=1e-5 * float(wanted_MV.abs().max()))
