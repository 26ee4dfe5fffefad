"""Measure exported heads in a serving engine: acceptance beside our own chains, and speed over plain serving.

    python benchmarks/engines.py runs/quickstart/heads --engine vllm --questions mt_bench.jsonl --limit 24 \\
        --engine-command "engines/vllm/bin/vllm serve" --engine-arguments "--dtype bfloat16 --max-model-len 2048"

`engine_setup.py` installs an engine. The script exports the heads, serves the target with and without them, and sends
both servers the same questions in turns, greedily. Our own decoder then drafts chains of the same length on the same
prompts and, in a replay, on the engine's own texts: there both should accept equally many drafts. Speed-ups are over
the engine's plain decoding.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from never_slower import prompts_of
from record import record
from tables import figures

import headstart
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.drafters.heads import HeadDrafter
from headstart.eval.environment import environment
from headstart.heads.base import DraftHead
from headstart.hub.engine_tuning import EngineWorkload, measure_drafts
from headstart.hub.engines.export import export_for
from headstart.hub.format import CALIBRATION
from headstart.model.model import Target
from headstart.pipeline.in_engine import served_with
from headstart.servers.engines import ENGINES
from headstart.servers.process import Server
from headstart.support.files import read_json
from headstart.tree.tree import TreeShape
from headstart.tuning.acceptance import Text
from headstart.tuning.acceptance import measure_drafts as measure_acceptance

MEASURED = {
    "tokens_per_second": "tokens_per_second",
    "plain_tokens_per_second": "plain_tokens_per_second",
    "over_plain": "speedup",
    "over_plain_expected": "expected",
    "round_ms": "round_ms",
    "plain_ms": "plain_ms",
    "accepted_per_round": "accepted",
    "acceptance_by_place": "by_position",
}
"""Figures of a row, and their fields in the engine's tuning."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", type=Path, help="a folder of heads")
    parser.add_argument("--engine", choices=list(ENGINES), required=True)
    parser.add_argument("--engine-command", default="", help="command that starts the engine")
    parser.add_argument("--engine-target", default="", help="target in the format of the engine")
    parser.add_argument("--engine-arguments", default="", help="further arguments of the engine")
    parser.add_argument("--questions", type=Path, help="JSONL, as for `headstart eval`; default: built-in prompts")
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--drafts", nargs="+", type=int, default=[3])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--target", help="target; default: as recorded in the heads")
    parser.add_argument("--dtype", default="bfloat16", help="of our decoder")
    parser.add_argument("--weights", help="dtype of the exported heads")
    parser.add_argument("--out", type=Path, default=Path("out/engines"))
    options = parser.parse_args(arguments)

    engine = ENGINES[options.engine]
    decoder = headstart.load(options.heads, options.target, dtype=options.dtype)
    prompts = prompts_of(decoder.target, options.questions, options.limit)
    workload = EngineWorkload(prompts, options.max_new_tokens, read_json(options.heads / CALIBRATION)["acceptance"])
    rows: list[dict[str, Any]] = []
    texts: list[list[Text]] = []
    with TemporaryDirectory() as place:
        exported = export_for(options.heads, Path(place) / "heads", engine.format, options.target, options.weights)
        served = options.engine_target or engine.target_argument(exported.facts.folder, exported.facts.gguf)

        def start(drafting: Sequence[str], name: str) -> Server:
            log = options.out / f"{engine.name}-{name}.log"
            return Server(
                engine, served, drafting, log, command=options.engine_command, options=options.engine_arguments
            )

        with start((), "plain") as plain:
            for drafts in options.drafts:
                with start(served_with(engine, exported, {1: drafts}), f"{drafts}-drafts") as drafted:
                    compared = measure_drafts(plain, drafted, drafts, workload)
                texts.append([Text.of(*pair) for pair in zip(prompts, map(list, compared.answers), strict=True)])
                row: dict[str, Any] = {"engine": engine.name, "version": plain.version(), "served": Path(served).name}
                row |= {"drafts": drafts, "questions": len(prompts), "same_texts": compared.same}
                rows.append(row | {name: getattr(compared.row, key) for name, key in MEASURED.items()})
    for row, written in zip(rows, texts, strict=True):
        chain = HeadDrafter(decoder.heads, TreeShape.chain(row["drafts"]))
        row |= ours(decoder.target, chain, prompts, options.max_new_tokens)
        row["our_accepted_on_its_texts"] = replayed(decoder.target, decoder.heads, written, row["drafts"])
        accepted = row["our_accepted_on_its_texts"]
        row["share_of_ours"] = row["accepted_per_round"] / accepted if accepted else None
    settings = {"arguments": options.engine_arguments, "weights": options.weights}
    settings["max_new_tokens"] = options.max_new_tokens
    what = f"Heads in {engine.name} beside our own decoder's chain on the same questions, greedy, batch size 1."
    file = options.out / f"{engine.name}.json"
    record(file, what, rows, environment(decoder.target), __file__, arguments, settings)
    print(figures(rows))


def ours(target: Target, drafter: HeadDrafter, prompts: Sequence[list[int]], most: int) -> dict[str, Any]:
    """Return the drafts that our decoder accepts in chains of the same length, per round and by place."""
    loop, options = DecodeLoop(target, drafter), DecodeOptions(most, draft="on")
    rounds = [done for prompt in prompts for done in loop.generate([prompt], options)[0].rounds if done.nodes > 1]
    depth = max((done.nodes for done in rounds), default=1)
    places = [sum(done.emitted > place for done in rounds) / len(rounds) for place in range(1, depth)]
    return {"our_accepted_per_round": sum(places), "our_acceptance_by_place": places, "our_rounds": len(rounds)}


def replayed(target: Target, heads: DraftHead, texts: Sequence[Text], drafts: int) -> float:
    """Return the drafts per round that our chains would have had accepted on given texts.

    Engines round differently, so a text that leaves ours at a near-tie has another acceptance: a close comparison needs
    the same texts. The last round is cut at the end of the text, as our decoder cuts it.
    """
    rounds = accepted = 0
    for text in texts:
        beyond = heads.draft_steps  # padding, so that the last tokens of the text can be drafted from; not counted
        longer = Text([*text.tokens, *text.tokens[-1:] * beyond], [*text.supervised, *[True] * beyond])
        ranks = measure_acceptance(target, heads, [longer], 1).ranks_OK[:, :drafts].tolist()
        decided, answer = 1, sum(text.supervised)  # the prompt's forward decides the first token
        while decided < answer:
            right = next((place for place, rank in enumerate(ranks[decided - 1]) if rank), drafts)
            rounds, accepted = rounds + 1, accepted + min(right, answer - decided - 1)
            decided += right + 1
    return accepted / rounds if rounds else 0.0


if __name__ == "__main__":
    main()
