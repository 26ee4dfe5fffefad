"""MTP heads against a plain reading of the published formula, with texts shorter than the modules look back, and what
they refuse."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from headstart.errors import UserError
from headstart.heads.base import family, make_config
from headstart.heads.mtp import MtpHead
from headstart.target.fitting import FINAL
from headstart.target.model import Target
from tests.heads.test_contract import CASES, batch_of, build, shake
from tests.tiny import tiny_model

TEXT = [3, 9, 14, 27, 33, 8, 40, 12, 55, 6]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", vocab_size=61))


def mtp(target: Target) -> MtpHead:
    heads = shake(build("mtp-own-modules", target)).eval()
    assert isinstance(heads, MtpHead)
    return heads


@torch.no_grad()
def by_the_formula(heads: MtpHead, target: Target, text: list[int]) -> list[torch.Tensor]:
    """Logits [T - k - 1, V] of each module k: h'_k = M_k [RMSNorm(Emb(t_i+k)); RMSNorm(h_k-1)], h_k = TRM_k(h'_k), with
    transformers' own decoder layer and rotary positions (DeepSeek-V3, equations 21 to 23; the embedding comes first in
    the released weights)."""
    config = LlamaConfig(**target.config.to_dict())
    config._attn_implementation = "sdpa"
    hidden_1TE = target.hidden_states([text], [FINAL])[0][FINAL][None]
    found = []
    for depth, module in enumerate(heads.steps):
        layer = LlamaDecoderLayer(config, 0)
        layer.load_state_dict({name.removeprefix("layers.0."): x for name, x in module.by_published_name(0).items()})
        if (length := len(text) - depth - 1) < 1:
            break
        embedded_1TE = target.embedding_weight[torch.tensor([text[depth + 1 :]])]
        before_1TE = hidden_1TE[:, :length]

        def rms(x: torch.Tensor, norm: torch.nn.RMSNorm) -> torch.Tensor:
            return x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * norm.weight

        both = torch.cat([rms(embedded_1TE, module.enorm), rms(before_1TE, module.hnorm)], -1)
        joined = both @ module.eh_proj.weight.T
        positions_1T = torch.arange(length)[None]
        rotary = LlamaRotaryEmbedding(config)(joined, positions_1T)
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        out = layer(joined, attention_mask=mask, position_ids=positions_1T, position_embeddings=rotary)
        hidden_1TE = rms(out[0] if isinstance(out, tuple) else out, module.norm)
        found.append(target.lm_head(hidden_1TE)[0])
    return found


def test_each_module_computes_the_published_formula(target: Target) -> None:
    heads = mtp(target)
    wanted = by_the_formula(heads, target, TEXT)
    steps = list(heads.unroll(batch_of(target, heads, [TEXT], prompt=1)))
    assert len(steps) == 3
    for depth, (step, logits) in enumerate(zip(steps, wanted, strict=True)):
        assert step.origin_M.tolist() == list(range(len(TEXT) - 2 - depth))
        found, sure = step.logits_MD.detach(), logits[step.origin_M]
        torch.testing.assert_close(found, sure, rtol=1e-5, atol=1e-5 * float(sure.abs().max()))


@torch.inference_mode()
def test_texts_too_short_for_every_module_are_drafted_as_trained(target: Target) -> None:
    """A prompt of one token, where later modules have nothing but drafts to read, in a batch with a longer one."""
    heads = mtp(target)
    prompts, chains = [[3], [9, 14, 27, 33]], [[8, 40, 12], [55, 6, 19]]
    states = target.prefill(target.new_cache(2, 8), prompts, heads.aux_layers).aux_hidden_states
    session = heads.prefill(prompts, states)
    here = torch.zeros(2, 1, dtype=torch.long)
    for depth in range(3):
        tokens = torch.tensor([[chain[depth]] for chain in chains])
        logits_BWD = heads.draft_step(session, tokens, here, depth)
        for row, (prompt, chain) in enumerate(zip(prompts, chains, strict=True)):
            wanted = by_the_formula(heads, target, prompt + chain)[depth][len(prompt) - 1]
            torch.testing.assert_close(logits_BWD[row, 0], wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@torch.inference_mode()
def test_a_round_may_be_drafted_again_and_stop_early(target: Target) -> None:
    """A round that stops at a level leaves the modules below it behind; drafting twice in a round changes nothing."""
    heads = mtp(target)
    text = [*TEXT, 21, 44, 17]
    states = target.prefill(target.new_cache(1, len(text)), [text], heads.aux_layers).aux_hidden_states
    session = heads.prefill([text[:2]], {FINAL: states[FINAL][:, :2]})
    here = torch.zeros(1, 1, dtype=torch.long)
    read = 2
    for levels, count in ((1, 1), (2, 3), (0, 2), (1, 1), (3, 2)):
        for _ in range(2):
            for depth in range(levels):
                made = heads.draft_step(session, torch.tensor([[text[read + depth]]]), here, depth)
        state_1PE = states[FINAL][:, read : read + count]
        session.commit(state_1PE, torch.tensor([text[read : read + count]]), [count])
        if levels:
            wanted = by_the_formula(heads, target, text[: read + levels])[levels - 1][read - 1]
            torch.testing.assert_close(made[0, 0], wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
        read += count


def test_a_shared_module_has_the_weights_of_one(target: Target) -> None:
    shared, own = (build(name, target) for name in ("mtp", "mtp-own-modules"))
    assert own.trainable_parameters == 3 * shared.trainable_parameters
    assert CASES["mtp"]["draft_steps"] == shared.draft_steps == own.draft_steps == 3


def test_no_engine_reads_them_beside_a_target_of_another_kind(target: Target) -> None:
    with pytest.raises(UserError, match=r"only as part of the checkpoint.*train eagle3 heads"):
        build("mtp", target).publish()


def test_a_random_start_stays_random(target: Target) -> None:
    settings = {"family": "mtp", "draft_steps": 2, "shared_module": False, "init": "random"}
    heads = family("mtp")(make_config(settings, target))
    assert isinstance(heads, MtpHead)
    before = [parameter.clone() for parameter in heads.parameters()]
    heads.warm_start(target)
    heads.fit([batch_of(target, heads, [TEXT], prompt=1)])
    assert all(torch.equal(one, other) for one, other in zip(heads.parameters(), before, strict=True))
