"""Do the speculators library's own classes load what we export, and do we import what they save?

    python benchmarks/speculators_load.py HEADS

Run it where `speculators` is installed beside headstart; it needs no GPU and no server. The library loads our export:
each tensor of the file must be in the model, bit for bit, and what the model has beyond the file must be the target's.
Then both draft from the same states. The other way round a model of theirs with random weights is saved by their
`save_pretrained`, imported, and both draft again. Draft logits are compared as a share of the largest.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from record import record
from safetensors.torch import load_file
from tables import table
from torch import Tensor

from headstart.eval.environment import environment
from headstart.heads.base import DraftHead
from headstart.heads.exchange.published import BLOCKS
from headstart.heads.io import load_heads
from headstart.hub.engines.export import export_for
from headstart.hub.engines.importing import import_heads
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.support.files import write_text

OF_THE_TARGET = {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"}
"""Tensors that the library takes from the verifier; of block drafters the LM head too."""
TEXT = "Speculative decoding drafts several tokens and verifies them in one pass, which is"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", type=Path, help="a folder of EAGLE-3, DFlash or DSpark heads of the whole vocabulary")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=Path("out/speculators"))
    options = parser.parse_args(arguments)

    classes: Any = import_module("speculators")
    target = load_target(options.target, "float32", "cpu")
    rows = []
    with TemporaryDirectory() as place:
        export_for(options.heads, Path(place) / "ours", "speculators", dtype="float32")
        file = load_file(Path(place) / "ours" / "model.safetensors")
        model = loaded(classes, Path(place) / "ours")
        of_target = OF_THE_TARGET | ({"lm_head.weight"} if hasattr(model, "block_size") else set())
        state = model.state_dict()
        rows.append(
            {
                "name": "our export, loaded by their classes",
                "tensors": len(file),
                "equal": sum(
                    torch.equal(state[name].to(tensor.dtype), tensor) for name, tensor in file.items() if name in state
                ),
                "not_of_the_file": sorted(set(state) - set(file) - of_target),
                "logits_off": off(theirs(model, target), own(load_heads(options.heads, target).float(), target)),
            }
        )
        with torch.no_grad():
            random = torch.Generator().manual_seed(0)
            for name, weight in model.named_parameters():
                if name not in of_target:
                    weight.add_(0.02 * torch.randn(weight.shape, generator=random))
        model.save_pretrained(Path(place) / "theirs")
        heads = import_heads(Path(place) / "theirs", target, Path(place) / "imported")
        file, kept = load_file(Path(place) / "theirs" / "model.safetensors"), heads.publish().tensors
        rows.append(
            {
                "name": "saved by their classes, imported",
                "tensors": len(kept),
                "equal": sum(torch.equal(file[name].float(), tensor.float()) for name, tensor in kept.items()),
                "not_of_the_file": sorted(set(kept) - set(file)),
                "logits_off": off(theirs(model, target), own(heads.float(), target)),
            }
        )
    what = "Heads between headstart and the speculators library, float32; differences of draft logits."
    file_out = options.out / "speculators.json"
    record(file_out, what, rows, environment(target), __file__, arguments, {"target": options.target}, {"rows": rows})
    write_text(file_out.with_suffix(".md"), report(rows))
    print(report(rows))


def loaded(classes: Any, folder: Path) -> Any:
    """A model of theirs; its attention is the one that needs no compiler."""
    config = classes.SpeculatorModelConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    return classes.SpeculatorModel.from_pretrained(str(folder), config=config).float().eval()


@torch.no_grad()
def theirs(model: Any, target: Target) -> Tensor:
    """Draft logits of their forward at the last position: [D], of a block drafter of each step in turn [K, V]."""
    tokens = target.tokenizer.encode(TEXT)
    if hasattr(model, "block_size"):
        return their_block(model, target, tokens)
    kept: list[Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda _, __, logits: kept.append(logits))
    try:
        model(
            hidden_states=hidden(target, tokens, model.config.eagle_aux_hidden_state_layer_ids)[:, :-1],
            input_ids=torch.tensor([tokens[1:]]),
            document_ids=torch.zeros(1, len(tokens) - 1, dtype=torch.long),
            ttt_steps=1,
        )
    finally:
        handle.remove()
    return kept[0][0, -1]


def their_block(model: Any, target: Target, tokens: Sequence[int]) -> Tensor:
    """Draft logits of their forward for the block at the last token, the anchor; a text goes on after it, unseen."""
    ids = torch.tensor([[*tokens, *tokens[: model.block_size]]])
    supervised = torch.zeros(ids.shape)
    supervised[0, len(tokens) - 1] = 1
    _, logits, *_ = model._backbone_forward(
        hidden(target, ids[0].tolist(), model.target_layer_ids),
        ids,
        supervised,
        torch.zeros(*ids.shape, target.hidden_size),
        torch.zeros(ids.shape, dtype=torch.long),
        max_anchors=1,
    )
    logits_KV: Tensor = logits[0, 0 if model.config.sample_from_anchor else 1 :]
    if (markov := getattr(model, "markov_head", None)) is not None:
        before = torch.tensor([chain_of(tokens, model.block_size)])
        logits_KV = logits_KV + markov.block_bias(prev_token_ids=before, hidden_states=logits_KV[None])[0]
    return logits_KV


def chain_of(tokens: Sequence[int], length: int) -> list[int]:
    """Some drafts in a row, after which logits are compared: the newest token, then the text's first ones."""
    return [tokens[-1], *tokens[: length - 1]]


@torch.no_grad()
def own(heads: DraftHead, target: Target) -> Tensor:
    """Ours after the same token [D], of a block drafter of each step [K, V]."""
    tokens = target.tokenizer.encode(TEXT)
    text = tokens[:-1]
    states = target.prefill(target.new_cache(1, len(text)), [text], heads.aux_layers).aux_hidden_states
    session, level = heads.prefill([text], states), torch.zeros(1, 1, dtype=torch.long)
    if heads.publishes not in BLOCKS:
        return heads.draft_step(session, torch.tensor([tokens[-1:]]), level, 0)[0, 0]
    chain = chain_of(tokens, heads.draft_steps)
    steps = [heads.draft_step(session, torch.tensor([[token]]), level, depth) for depth, token in enumerate(chain)]
    return torch.cat(steps, dim=1)[0]


@torch.no_grad()
def hidden(target: Target, tokens: Sequence[int], layers: Sequence[int]) -> Tensor:
    """The aux hidden states side by side [1, T, layers * E]."""
    states = target.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer] for layer in layers], dim=-1)


def off(theirs_D: Tensor, ours_D: Tensor) -> float:
    """The largest difference as a share of the largest logit."""
    return float((theirs_D - ours_D).abs().max() / ours_D.abs().max())


def report(rows: Sequence[dict[str, Any]]) -> str:
    """A row for each direction."""
    head = ["", "tensors", "equal", "neither in the file nor the target's", "logits off by"]
    return (
        table(
            head,
            [
                [
                    row["name"],
                    row["tensors"],
                    row["equal"],
                    ", ".join(row["not_of_the_file"]) or "–",
                    f"{row['logits_off']:.1e}",
                ]
                for row in rows
            ],
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
