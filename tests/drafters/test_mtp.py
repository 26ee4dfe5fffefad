"""Drafting with a target's own module: against a plain version of the published computation, and losslessly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.drafters.catalog import make_drafters
from headstart.drafters.heads import ShippedDrafter
from headstart.drafters.ngram import NgramDrafter
from headstart.errors import UserError
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from headstart.tree.tree import Committed
from tests.decode.drafters import lossless
from tests.shipped import KINDS, WEIGHTS, ShippedTarget, reload, ship

TEXT = [3, 9, 14, 27, 33, 8, 40, 12, 55, 6, 21, 44, 17]


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ShippedTarget]:
    return {kind: ship(kind, tmp_path_factory.mktemp("shipped") / kind) for kind in KINDS}


class Reference:
    """A module's entries one after the other, as the papers write them down."""

    def __init__(self, one: ShippedTarget) -> None:
        self.one, self.layer, self.outer = one, one.layers[0], one.outer[0]
        self.inputs: list[Tensor] = []

    def entry(self, state_E: Tensor, token: int) -> Tensor:
        """Append an entry and return the module's output, [E]."""
        enorm, hnorm, join_EJ, _ = self.outer
        both = [self.rms(self.one.target.embedding_weight[token], enorm), self.rms(state_E, hnorm)]
        self.inputs.append(join_EJ @ torch.cat(both[::-1] if self.one.state_first else both))
        joined_1TE = torch.stack(self.inputs)[None]
        width = len(self.inputs)
        positions_1T = torch.arange(width)[None]
        axes = 3 if "Qwen3_5" in type(self.one.rotary).__name__ else 1  # of pictures; a text has the same on all
        rotary = self.one.rotary(joined_1TE, positions_1T if axes == 1 else positions_1T.expand(axes, 1, -1))
        mask = torch.full((1, 1, width, width), float("-inf")).triu(1)
        made = self.layer(joined_1TE, attention_mask=mask, position_ids=positions_1T, position_embeddings=rotary)
        return self.rms((made[0] if isinstance(made, tuple) else made)[0, -1], self.outer[3])

    def rms(self, x_E: Tensor, weight_E: Tensor) -> Tensor:
        return x_E * (x_E.square().mean() + self.one.target.config.rms_norm_eps).rsqrt() * weight_E


@torch.inference_mode()
def drafted_by_reference(one: ShippedTarget, text: list[int], chain: list[int]) -> list[Tensor]:
    """Return the logits after each token of a chain that follows a text."""
    layer = one.target.num_layers if one.before_norm else FINAL
    states_TE = one.target.hidden_states([text], [layer])[0][layer]
    tokens, module = [*text, *chain], Reference(one)
    for index, state_E in enumerate(states_TE):
        made_E = module.entry(state_E, tokens[index + 1])
    found = [made_E]
    for token in chain[1:]:
        found.append(module.entry(found[-1], token))
    return [one.target.lm_head(made_E) for made_E in found]


def assert_close(found: Tensor, wanted: Tensor) -> None:
    """Compare relative to the largest value, since float32 sums are in another order."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_drafts_equal_the_published_computation(kind: str, shipped: dict[str, ShippedTarget]) -> None:
    """Two rows of different lengths; rounds that accept more or less, and one without a draft. With two modules, the
    first one takes every draft."""
    one = shipped[kind]
    heads = ShippedDrafter(one.target).heads
    (layer,) = heads.aux_layers
    texts = [TEXT, TEXT[::-1]]
    states = one.target.hidden_states(texts, [layer])
    known_BTE = torch.stack([of_text[layer] for of_text in states])
    read = [2, 5]
    session = heads.prefill([text[:length] for text, length in zip(texts, read, strict=True)], {layer: known_BTE})
    here_B1 = torch.zeros(2, 1, dtype=torch.long)
    for counts, drafts in (([3, 1], True), ([1, 2], False), ([2, 1], True), ([1, 1], True)):
        for depth in range(3 if drafts else 0):
            tokens = [[text[length + depth]] for text, length in zip(texts, read, strict=True)]
            logits_B1V = heads.draft_step(session, torch.tensor(tokens), here_B1, depth)
            for row, (text, length) in enumerate(zip(texts, read, strict=True)):
                chain = text[length : length + depth + 1]
                wanted = drafted_by_reference(one, text[:length], chain)
                assert_close(logits_B1V[row, 0], wanted[depth])
        accepted = [text[length : length + more] for text, length, more in zip(texts, read, counts, strict=True)]
        parts = [known_BTE[row, length : length + max(counts)] for row, length in enumerate(read)]
        heads.commit(session, Committed.of(accepted, {layer: torch.stack(parts)}))
        read = [length + more for length, more in zip(read, counts, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_text_equals_plain_decoding(kind: str, shipped: dict[str, ShippedTarget]) -> None:
    target = shipped[kind].target
    options = DecodeOptions(max_new_tokens=12, ignore_end=True)
    texts = [[3], [8, 40, 12, 5, 51, 22], [9, 14, 27]]
    stock = target.model.generate(torch.tensor(texts[1:2]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    drafter = ShippedDrafter(target)
    for drafters in ([drafter], [drafter, NgramDrafter()]):
        rows = lossless(target, drafters, texts, options)
    assert stock[0, 6:].tolist() == rows[1].tokens
    assert max(one.nodes for row in rows for one in row.rounds) > 2


def _only_embeddings(model: Any) -> None:
    """Make the next token a function of the last one alone: layers add nothing, and no norm scales."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
        model.lm_head.weight.normal_(generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["deepseek"])
def test_modules_that_know_the_target_have_every_draft_accepted(kind: str, tmp_path: Path) -> None:
    """A module reads the embedding of the token after its state, which alone determines the next token here. With the
    state instead, it would draft the token that is already there."""
    ship(kind, tmp_path, _only_embeddings)
    tensors = load_file(tmp_path / WEIGHTS)
    for name in tensors:
        if name.endswith(("norm.weight", "layernorm.weight")):
            tensors[name] = torch.ones_like(tensors[name])
        if name.endswith("eh_proj.weight"):
            tensors[name] = torch.cat([torch.eye(64), torch.zeros(64, 64)], dim=1)
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    target = reload(tmp_path)
    drafter = ShippedDrafter(target)
    (row,) = DecodeLoop(target, drafter).generate([[3, 9, 14]], DecodeOptions(max_new_tokens=25, ignore_end=True))
    assert row.tokens_per_round == 4


def test_a_checkpoint_without_its_modules_is_refused(shipped: dict[str, ShippedTarget], tmp_path: Path) -> None:
    """transformers drops the tensors when it loads, and so when it saves."""
    for kind, said in (("deepseek", r"model\.layers\.2\.eh_proj"), ("qwen3_next", r"mtp\.fc")):
        shipped[kind].target.model.save_pretrained(tmp_path / kind)
        with pytest.raises(UserError, match=said + r".*leaves them out of what it saves.*as it was published"):
            make_drafters("mtp", reload(tmp_path / kind))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.layers.2.hnorm.weight", r"lacks model\.layers\.2\.hnorm\.weight of its.*Fetch the checkpoint again"),
        ("model.layers.2.self_attn.o_proj.weight", r"lacks tensors of its layer.*o_proj\.weight.*Fetch the checkpoint"),
        ("model.layers.2.self_attn.o_proj.weight_scale_inv", r"are quantised.*in bfloat16"),
    ],
)
def test_incomplete_and_packed_modules_are_refused(name: str, said: str, tmp_path: Path) -> None:
    ship("deepseek", tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    if tensors.pop(name, None) is None:
        tensors[name] = torch.ones(1)
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(UserError, match=said):
        ShippedDrafter(reload(tmp_path))


def test_in_bfloat16_a_router_keeps_its_bias_in_float32(shipped: dict[str, ShippedTarget]) -> None:
    """As in transformers, since rounding it would send tokens to other experts."""
    ours = shipped["deepseek"].target
    model = type(ours.model).from_pretrained(ours.spec, dtype=torch.bfloat16)
    heads = ShippedDrafter(Target(model, None, ours.spec)).heads
    assert {weight.dtype for weight in heads.parameters()} == {torch.bfloat16}
    (bias,) = (buffer for name, buffer in heads.named_buffers() if name.endswith("e_score_correction_bias"))
    assert bias.dtype == torch.float32


def test_unknown_layer_types_are_refused(shipped: dict[str, ShippedTarget], monkeypatch: pytest.MonkeyPatch) -> None:
    target = shipped["mimo"].target
    monkeypatch.setattr("headstart.heads.parts.native_module.CONFIG_MAPPING", {})
    with pytest.raises(UserError, match=r"a layer of type 'qwen2', which transformers lacks.*another drafter"):
        ShippedDrafter(target)
