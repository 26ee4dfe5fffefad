"""Hidden states that vLLM computed beside ours: how far apart, and are heads trained on them as good?

    python benchmarks/engine_setup.py vllm engines/vllm
    python benchmarks/states_from_vllm.py quickstart --engine-command \\
        "engines/vllm/bin/python -m vllm.entrypoints.openai.api_server --model" \\
        --engine-arguments "--dtype bfloat16 --max-model-len 2048 --max-num-seqs 4 --enforce-eager"

A plain vLLM writes the conversations (or --run has some), one that extracts hidden states reads them, and the states
are taken over as `headstart data import-states` does. The same conversations get our own states. Of a few, the states
are computed in float32 as well: what of the distance is vLLM's and what is ours. Then the recipe's heads are trained
twice, on vLLM's states and on ours, with one seed, and judged by the same validation. What was done is not done again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from arms import TrainingData, arm, aux_layers_of, budget, facts, options_of, trained
from record import record
from tables import table

from headstart.data.conversations.building import build_conversations
from headstart.data.conversations.records import Conversation, read_conversations
from headstart.data.states.shards import build_store
from headstart.data.states.store import StateStore
from headstart.data.states.vllm_files import Import, serve_arguments
from headstart.data.states.vllm_servers import take_from_servers
from headstart.eval.environment import environment
from headstart.pipeline.run import CONVERSATIONS
from headstart.servers.engines import ENGINES
from headstart.servers.process import Server
from headstart.support.files import write_text
from headstart.target.fitting import FINAL
from headstart.target.loading import load_target, loadable_folder
from headstart.target.model import Target

CPU_CONNECTOR = Path(__file__).resolve().parent / "vllm_cpu"
SPLITS = ("train", "calibration")
PLENTY = 10**12


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of(__doc__, Path("out/states_from_vllm"), runs=False)
    parser.add_argument("recipe")
    parser.add_argument("--run", type=Path, help="whose conversations to use; by default vLLM writes some")
    parser.add_argument("--engine-command", default="", help="what starts vLLM")
    parser.add_argument("--engine-arguments", default="", help="more of its own")
    parser.add_argument("--stock-connector", action="store_true", help="vLLM's own connector, which needs CUDA")
    parser.add_argument("--conversations", type=int, default=60)
    parser.add_argument("--validation", type=int, default=24)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--exact", type=int, default=6, help="conversations that are also read in float32")
    options = parser.parse_args(arguments)

    overrides = [
        *(f"data.conversations={options.conversations}", f"data.validation={options.validation}"),
        *("data.heldout=0", "data.minutes=null", f"data.max_new_tokens={options.max_new_tokens}"),
        *(*budget(steps=options.steps), f"train.eval_every={options.steps}", f"train.save_every={options.steps}"),
    ]
    one = arm("ours", options.recipe, [*overrides, *options.set])
    target = load_target(options.target, options.dtype)
    layers = sorted(aux_layers_of(target, one.recipe))
    out: Path = options.out

    def serve(name: str, extra: Sequence[str]) -> Server:
        return Server(
            ENGINES["vllm"],
            loadable_folder(options.target),
            extra,
            out / f"{name}.log",
            command=options.engine_command,
            options=options.engine_arguments,
            start_seconds=3600.0,
        )

    if options.run is not None:
        counts = {"train": options.conversations, "calibration": options.validation}
        texts = {split: _of_run(options.run, split)[:count] for split, count in counts.items()}
    else:
        texts = conversations(target, one.recipe.data, out, lambda: serve("plain", ()))
    everything = [item for split in SPLITS for item in texts[split]]
    connector = {} if options.stock_connector else _on_cpu()
    files = (out / "files").resolve()
    work = Import(out / "vllm" / "shards", target, everything, layers)
    if work.waiting:
        with serve("extraction", serve_arguments(target, layers, files, **connector)) as server:
            take_from_servers([server.url], work, one.recipe.data.server_requests)
    stores = {name: stores_of(out / name, target, layers, texts) for name in ("vllm", "ours")}
    rows: list[dict[str, Any]] = compared(stores["vllm"], stores["ours"], layers)
    add_exact(rows, stores, load_target(options.target, "float32"), layers, options.exact)

    heads = {}
    for name, own in stores.items():
        data = TrainingData(own["train"], stores["ours"]["calibration"], texts["calibration"])
        trained(arm(name, options.recipe, [*overrides, *options.set]), target, data, out / f"heads-{name}")
        heads[name] = facts(out / f"heads-{name}")
    results = {"layers": rows, "heads": heads, "tokens": stores["ours"]["train"].tokens}
    settings = {"recipe": options.recipe, "set": [*overrides, *options.set], "arguments": options.engine_arguments}
    what = "States of vLLM's extraction beside ours on the same conversations, and heads trained on each."
    table_rows = [{"name": name, **row} for name, row in heads.items()]
    record(out / "states_from_vllm.json", what, table_rows, environment(target), __file__, arguments, settings, results)
    write_text(out / "states_from_vllm.md", report(results))
    print(report(results))


def conversations(target: Target, section: Any, out: Path, serve: Any) -> dict[str, list[Conversation]]:
    """Written once by a plain vLLM."""
    folder = out / "conversations"
    if not (folder / "train.jsonl").is_file():
        with serve() as server:
            build_conversations(target, section.model_copy(update={"server": (server.url,)}), folder)
    return {split: read_conversations(folder / f"{split}.jsonl") for split in SPLITS}


def _of_run(run: Path, split: str) -> list[Conversation]:
    return read_conversations(run / CONVERSATIONS / f"{split}.jsonl")


def _on_cpu() -> dict[str, str]:
    """The connector without CUDA, which vLLM finds on its path."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CPU_CONNECTOR), os.environ.get("PYTHONPATH")]))
    return {"kv_connector": "CpuHiddenStates", "kv_connector_module_path": "states_connector"}


def stores_of(
    folder: Path, target: Target, layers: Sequence[int], texts: dict[str, list[Conversation]]
) -> dict[str, StateStore]:
    """Stores of both splits; what the shards of the folder lack is computed."""
    shards = folder / "shards"
    return {
        split: build_store(folder / split, texts[split], target, layers, budget_bytes=PLENTY, shards=shards)
        for split in SPLITS
    }


def compared(theirs: dict[str, StateStore], ours: dict[str, StateStore], layers: Sequence[int]) -> list[dict[str, Any]]:
    """By layer, how far the states of tokens are apart, as shares of our states' size."""
    rows = []
    for layer in layers:
        shares = []
        for split in SPLITS:
            for index in range(len(ours[split])):
                one, other = theirs[split].get(index), ours[split].get(index)
                assert torch.equal(one.tokens_T, other.tokens_T), "the same conversations"
                shares.append(share(one.states[layer], other.states[layer]))
        every_S = torch.cat(shares)
        rows.append({"layer": layer, "tokens": len(every_S), **_figures(every_S)})
    return rows


def add_exact(
    rows: Sequence[dict[str, Any]],
    stores: dict[str, dict[str, StateStore]],
    exact: Target,
    layers: Sequence[int],
    count: int,
) -> None:
    """Put into each row how far both are from the states that float32 gives."""
    found: dict[tuple[str, int], list[torch.Tensor]] = {}
    for index in range(min(count, len(stores["ours"]["train"]))):
        tokens = stores["ours"]["train"].get(index).tokens_T.tolist()
        (states,) = exact.hidden_states([tokens], layers)
        for name, own in stores.items():
            sample = own["train"].get(index)
            for layer in layers:
                found.setdefault((name, layer), []).append(share(sample.states[layer], states[layer]))
    for row in rows:
        for name in stores:
            row[f"{name}_from_float32"] = _figures(torch.cat(found[name, row["layer"]]))


def share(one_TE: torch.Tensor, other_TE: torch.Tensor) -> torch.Tensor:
    """|one - other| / |other| of each token."""
    one_TE, other_TE = one_TE.double(), other_TE.double()
    shares_T: torch.Tensor = (one_TE - other_TE).norm(dim=-1) / other_TE.norm(dim=-1).clamp_min(1e-30)
    return shares_T


def _figures(shares_S: torch.Tensor) -> dict[str, float]:
    return {
        "mean": float(shares_S.mean()),
        "median": float(shares_S.median()),
        "max": float(shares_S.max()),
    }


def report(results: dict[str, Any]) -> str:
    """A row for each layer, and one for each training."""
    head = ["layer", "tokens", "mean", "median", "max", "vLLM from float32", "ours from float32"]
    lines = [
        [
            "FINAL" if row["layer"] == FINAL else row["layer"],
            row["tokens"],
            *(f"{100 * row[key]:.2f} %" for key in ("mean", "median", "max")),
            *(f"{100 * row[f'{name}_from_float32']['mean']:.2f} %" for name in ("vllm", "ours")),
        ]
        for row in results["layers"]
    ]
    trainings = [
        [name, row["steps"], f"{row['validation_tau']:.4f}", " / ".join(f"{one:.3f}" for one in row["validation_top1"])]
        for name, row in results["heads"].items()
    ]
    return (
        f"Distance of vLLM's states from ours, as a share of their size.\n\n{table(head, lines)}\n\n"
        f"{table(['states', 'steps', 'τ', 'top 1'], trainings)}\n"
    )


if __name__ == "__main__":
    main()
