"""Heads adapted to what vLLM serves with them: drafts that it accepts on later requests, before and after.

    python benchmarks/adapting_in_vllm.py --run runs/quickstart \\
        --engine-command "engines/vllm/bin/python -m vllm.entrypoints.openai.api_server --model" \\
        --engine-arguments "--dtype bfloat16 --max-model-len 1024 --gpu-memory-utilization 0.2"

vLLM drafts with the heads of the run and answers requests of a kind that the run never saw (`SHIFTED`). The bodies of
requests and replies are the log that an update learns from, and the gate judges it on the newest of them. Then vLLM is
started with the earlier heads and with the new ones, and both answer the same later requests in turns, one at a time,
greedily. Answers and updates that are done are kept, so the command can be stopped and given again; it begins with a
run whose heads were not adapted yet.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from adapting import SHIFTED
from record import record
from rich.console import Console

from headstart.adapt.gate import in_words
from headstart.adapt.options import AdaptOptions
from headstart.adapt.update import Update
from headstart.data.prompts.chat import prompt_tokens
from headstart.errors import UserError
from headstart.eval.environment import environment
from headstart.eval.figures import Totals, ratio_interval
from headstart.hub.engines.export import export_for
from headstart.pipeline.in_engine import served_with
from headstart.pipeline.run import Run
from headstart.recipes.recipe import load_recipe
from headstart.servers.engines import ENGINES
from headstart.servers.process import Server
from headstart.support.files import read_jsonl, remove

ENGINE = ENGINES["vllm"]
USERS = 24
"""Sources of the requests, in turns."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--out", type=Path, default=Path("out/adapting_in_vllm"))
    parser.add_argument("--engine-command", default="", help="what starts vLLM")
    parser.add_argument("--engine-arguments", default="", help="more of its own")
    parser.add_argument("--served", type=int, default=344, help="requests that are served, learnt from and judged by")
    parser.add_argument("--later", type=int, default=40, help="further requests that compare")
    parser.add_argument("--at-a-time", type=int, default=8, help="requests under way while traffic is served")
    parser.add_argument("--tokens", type=int, default=96, help="longest answer")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--requests", type=int, default=256, help="new ones that the update waits for")
    parser.add_argument("--fall", type=float, default=AdaptOptions.fall, help="as of `headstart adapt gate`")
    parser.add_argument("--settings", nargs="*", default=[], help="of the training")
    options = parser.parse_args(arguments)
    out: Path = options.out
    if options.served + options.later > len(SHIFTED):
        raise UserError(f"There are {len(SHIFTED)} requests.", "Lower --served or --later.")
    run = Run(load_recipe(str(options.run / "recipe.yaml")), options.run, Console(quiet=True))
    asked = AdaptOptions(requests=options.requests, fall=options.fall)
    update = Update(run, out / "log", asked, options.settings)
    target, service = update.target, update.service

    def server(number: int) -> Server:
        """vLLM with the heads of an update, exported for it."""
        remove(out / "served" / f"{number:04d}")
        exported = export_for(service.heads(number), out / "served" / f"{number:04d}", ENGINE.format, target)
        return Server(
            ENGINE,
            ENGINE.own_target(exported.facts.folder, exported.facts.gguf),
            served_with(ENGINE, exported, options.drafts),
            out / f"vllm-{number}.log",
            command=options.engine_command,
            options=options.engine_arguments,
        )

    serve(server, SHIFTED[: options.served], update.log / "vllm.jsonl", options.tokens, options.at_a_time)
    if not service.updates():
        update.train()
        update.gate()
    judged = service.updates()[-1]
    print(in_words(judged["later"]), *map(in_words, judged["own"].values()), judged["why"], flush=True)
    numbers = (0, judged["number"])
    prompts = [
        prompt_tokens([{"role": "user", "content": text}], target.tokenizer) for text in SHIFTED[options.served :]
    ]
    with server(numbers[0]) as earlier, server(numbers[1]) as adapted:
        servers = (earlier, adapted)
        version = adapted.version()
        measured = compare(servers, prompts[: options.later], options.tokens)
    rows = [row(*pair, measured[0]) for pair in zip(("of the run", "adapted"), measured, strict=True)]
    record(
        out / "adapting_in_vllm.json",
        what=__doc__.splitlines()[0],
        rows=rows,
        machine=environment(target),
        script=__file__,
        arguments=arguments,
        settings={name: getattr(options, name) for name in ("served", "later", "at_a_time", "tokens", "drafts")}
        | {"engine": f"vllm {version}", "arguments": options.engine_arguments, "training": options.settings},
        details={"update": judged, "requests": measured},
    )
    print(*rows, sep="\n")


def serve(start: Callable[[int], Server], prompts: Sequence[str], log: Path, tokens: int, at_a_time: int) -> None:
    """Have vLLM answer prompts with the heads of the run, and keep the bodies of requests and replies in a log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    kept = [row["request"]["messages"][0]["content"] for _, row in read_jsonl(log)] if log.is_file() else []
    bodies = [body for body in requests(prompts, tokens) if body["messages"][0]["content"] not in kept]
    if not bodies:
        return
    with start(0) as server, httpx.Client(base_url=server.url, timeout=1800) as client:

        def exchange(body: Mapping[str, Any]) -> str:
            reply = client.post("/v1/chat/completions", json=dict(body)).raise_for_status().json()
            return json.dumps({"time": time.time(), "request": body, "response": reply}) + "\n"

        with ThreadPoolExecutor(at_a_time) as pool, log.open("a", encoding="utf-8") as file:
            for number, line in enumerate(pool.map(exchange, bodies), len(kept) + 1):
                file.write(line)
                file.flush()
                if number % 16 == 0:
                    print(f"served {number} of {len(prompts)}", flush=True)


def requests(prompts: Sequence[str], tokens: int) -> Iterator[dict[str, Any]]:
    """Bodies of chats, as clients would send them; greedy, with token ids."""
    for number, text in enumerate(prompts):
        body = {"model": ENGINE.model, "messages": [{"role": "user", "content": text}], "max_tokens": tokens}
        yield body | {"temperature": 0, "return_token_ids": True, "user": f"user {number % USERS}"}


def compare(servers: Sequence[Server], prompts: Sequence[list[int]], tokens: int) -> list[list[dict[str, Any]]]:
    """What each server counted for each prompt, asked in turns, another one first each time."""
    counted: list[list[dict[str, Any]]] = [[] for _ in servers]
    for server in servers:
        server.answer(prompts[0], 8)
    for number, prompt in enumerate(prompts):
        for which in range(len(servers))[:: 1 if number % 2 else -1]:
            before = servers[which].counters()
            answer = servers[which].answer(prompt, tokens)
            counts = servers[which].counters() - before
            places = {str(place): count for place, count in counts.items() if isinstance(place, int)}
            figures = {"rounds": counts["drafts"], "accepted": counts["accepted_tokens"], "places": places}
            counted[which].append({"tokens": len(answer.tokens), "seconds": answer.seconds, **figures})
    return counted


def row(name: str, counted: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What heads came to; tokens a round and tokens a second also over those of the earlier heads, `base`."""
    rounds, accepted = (sum(each[key] for each in counted) for key in ("rounds", "accepted"))
    places = sum((Counter(each["places"]) for each in counted), Counter[str]())
    over: dict[str, Any] = {} if counted is base else {
        "over_earlier": ratio_interval(a_round(counted), a_round(base), 0),
        "over_earlier_speed": ratio_interval(a_second(counted), a_second(base), 0),
    }  # fmt: skip
    return {
        "name": name,
        "requests": len(counted),
        "rounds": rounds,
        "accepted_per_round": accepted / rounds,
        "acceptance_by_place": [count / rounds for _, count in sorted(places.items())],
        "tokens_per_round": 1 + accepted / rounds,
        "tokens_per_second": sum(a_second(counted).tokens_N) / sum(a_second(counted).seconds_N),
        **over,
    }


def a_round(counted: Sequence[Mapping[str, Any]]) -> Totals:
    """Tokens and rounds of each request."""
    return Totals([each["rounds"] + each["accepted"] for each in counted], [each["rounds"] for each in counted])


def a_second(counted: Sequence[Mapping[str, Any]]) -> Totals:
    """Tokens and seconds of each request."""
    return Totals([each["tokens"] for each in counted], [each["seconds"] for each in counted])


if __name__ == "__main__":
    main()
