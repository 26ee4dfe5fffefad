"""Send a question to a vLLM server and print the answer and the accepted drafts.

    python client.py "Why is the sky blue?" --server http://localhost:8000

vLLM counts all requests together, so no other client may use the server meanwhile.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

import httpx

_COUNTER = re.compile(r"^vllm:spec_decode_num_(\w+)_total(?:\{([^}]*)\})? ([\d.e+]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Drafting:
    """Counters of a server since its start.

    Attributes:
        rounds: number of drafting rounds.
        accepted: accepted drafts by position.
    """

    rounds: float
    accepted: tuple[float, ...]

    def since(self, before: Drafting) -> Drafting:
        """Return the counts after `before`."""
        earlier = before.accepted or (0.0,) * len(self.accepted)
        counts = tuple(now - then for now, then in zip(self.accepted, earlier, strict=True))
        return Drafting(self.rounds - before.rounds, counts)


def drafting(server: httpx.Client) -> Drafting:
    """Read the counters of a server; zeros where it has not drafted yet."""
    rounds, accepted = 0.0, dict[int, float]()
    for name, labels, count in _COUNTER.findall(server.get("/metrics").raise_for_status().text):
        place = re.search(r'position="(\d+)"', labels)
        if name == "drafts":
            rounds += float(count)
        elif name == "accepted_tokens_per_pos" and place:
            accepted[int(place[1])] = accepted.get(int(place[1]), 0.0) + float(count)
    return Drafting(rounds, tuple(count for _, count in sorted(accepted.items())))


def answer(server: httpx.Client, question: str, max_tokens: int) -> str:
    """Return the served model's greedy answer."""
    model = server.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    messages = [{"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    reply = server.post("/v1/chat/completions", json=body).raise_for_status().json()
    return str(reply["choices"][0]["message"]["content"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("--server", default="http://localhost:8000")
    parser.add_argument("--max-tokens", type=int, default=128)
    options = parser.parse_args()
    with httpx.Client(base_url=options.server, timeout=600) as server:
        before = drafting(server)
        print(answer(server, options.question, options.max_tokens))
        counted = drafting(server).since(before)
    if not counted.rounds:
        print("\nThe server drafted nothing: was it started with --speculative-config?")
        return
    by_position = ", ".join(f"{accepted / counted.rounds:.2f}" for accepted in counted.accepted)
    accepted = sum(counted.accepted) / counted.rounds
    print(f"\n{counted.rounds:.0f} rounds, {accepted:.2f} accepted drafts per round ({by_position} by position)")


if __name__ == "__main__":
    main()
