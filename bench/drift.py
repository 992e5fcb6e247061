"""How far the approximate modes stray from the exact ones: bounded replay, and truncated prompts.

`python -m phalanx.bench.drift [--model tiny-a|random-tiny|all] [--json]`. Random weights: the figures
show that the modes differ and how the difference depends on what is kept, not what a trained model
would lose.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from phalanx.bench.perplexity import MODELS, model_dir
from phalanx.worker_svc.model.checkpoint import Weights, load_checkpoint
from phalanx.worker_svc.model.reader import Reader
from phalanx.worker_svc.model.truncation import Truncation

FOLLOWING: Final = 48  # tokens after the prompt over which logits are compared
PROMPTS: Final = 8
PROMPT_TOKENS: Final = 192
MAX_LEN: Final = 256

Read = Callable[[list[int]], Tensor]  # a prompt -> logits, float32 [rows, vocab], of its last row


@dataclass(frozen=True)
class Drift:
    """One mode against exact, over all prompts.

    Attributes:
        rel_l2: relative distance of the logits after the prompt, the exact greedy text given.
        argmax: share of these positions whose likeliest token is the same.
        first: place after the prompt of the first token that differs between the greedy texts: the
            median over the prompts; `FOLLOWING` where none did.
        same: prompts whose greedy text is the same over all `FOLLOWING` tokens.
    """

    model: str
    mode: str
    kept: int  # tokens read again, or kept of the prompt
    rel_l2: float
    argmax: float
    first: float
    same: int


def greedy(reader: Reader, logits: Tensor) -> tuple[list[int], Tensor]:
    """Continue after `logits` of the last token; the tokens, and the logits they were taken from."""
    tokens, rows = [], [logits[-1:]]
    while True:
        tokens.append(int(rows[-1].argmax()))
        if len(tokens) == FOLLOWING:
            return tokens, torch.cat(rows)
        rows.append(reader.read(tokens[-1:]))


@dataclass(frozen=True)
class Exact:
    """What an exact run makes of a prompt."""

    prompt: list[int]
    tokens: list[int]
    logits: Tensor


class Subject:
    """One model's exact runs, and the same prompts in other modes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._weights = load_checkpoint(model_dir(name))
        self._exact = Reader(self._weights, MAX_LEN)
        self.runs = [self._run(prompt) for prompt in prompts(self._weights)]

    def _run(self, prompt: list[int]) -> Exact:
        self._exact.restart()
        return Exact(prompt, *greedy(self._exact, self._exact.read(prompt)))

    @property
    def window(self) -> int:
        return self._weights.config.sliding_window

    @property
    def reach(self) -> int:
        """Tokens on which a window state rests."""
        return self._weights.config.num_hidden_layers * (self.window - 1)

    def truncated(self, keep: int) -> Drift:
        """Prompts of which the later layers read the last `keep` tokens."""
        reader = Reader(self._weights, MAX_LEN, Truncation("compact", keep))

        def read(prompt: list[int]) -> Tensor:
            reader.restart()
            return reader.read(prompt, prompt_len=len(prompt))

        return self._compare("yoco compact", keep, reader, read)

    def replayed(self, tokens: int) -> Drift:
        """Prompts restored but for their last token, from blocks and the last `tokens` read again."""
        reader = Reader(self._weights, MAX_LEN)

        def read(prompt: list[int]) -> Tensor:
            self._exact.restart()
            self._exact.read(prompt)
            reader.take_prefix(self._exact, len(prompt) - 2, tokens)
            return reader.read(prompt[-2:])

        return self._compare("bounded replay", tokens, reader, read)

    def _compare(self, mode: str, kept: int, reader: Reader, read: Read) -> Drift:
        distance, norm, agree, firsts = 0.0, 0.0, [], []
        for run in self.runs:
            given = torch.cat((read(run.prompt)[-1:], reader.read(run.tokens[:-1]))).double()
            distance += float((given - run.logits).square().sum())
            norm += float(run.logits.double().square().sum())
            differs = given.argmax(-1) != run.logits.argmax(-1)
            agree.append(1 - float(differs.double().mean()))
            # Up to there its own greedy text is the exact one.
            other = differs.nonzero()
            firsts.append(int(other[0]) if len(other) else FOLLOWING)
        return Drift(
            model=self.name,
            mode=mode,
            kept=kept,
            rel_l2=(distance / norm) ** 0.5,
            argmax=float(np.mean(agree)),
            first=float(np.median(firsts)),
            same=firsts.count(FOLLOWING),
        )


def prompts(weights: Weights) -> list[list[int]]:
    """Token ids without meaning, the same in every run."""
    draw = np.random.default_rng(20260101)
    top = weights.config.vocab_size
    return draw.integers(3, top, (PROMPTS, PROMPT_TOKENS)).tolist()  # type: ignore[no-any-return]


def measure(name: str) -> Iterator[Drift]:
    """Exactness first: replay of everything that a window rests on, and prompts that fit."""
    subject = Subject(name)
    least = subject.window + 6
    yield subject.replayed(subject.reach)
    for tokens in (4 * subject.window, 2 * subject.window, subject.window):
        yield subject.replayed(tokens)
    yield subject.truncated(PROMPT_TOKENS)
    for keep in (4 * least, 2 * least, least):
        yield subject.truncated(keep)


def main() -> None:
    parser = argparse.ArgumentParser(description="Approximate modes against exact ones.")
    parser.add_argument("--model", choices=(*MODELS, "all"), default="all")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = MODELS if arguments.model == "all" else (arguments.model,)
    found = [drift for name in names for drift in measure(name)]
    if arguments.json:
        json.dump({"rows": [asdict(drift) for drift in found]}, sys.stdout)
        print()
        return
    print(
        "| model | mode | tokens | rel. distance of logits | same argmax | first other token | same |"
    )
    print("|---|---|---|---|---|---|---|")
    for d in found:
        print(
            f"| {d.model} | {d.mode} | {d.kept} | {d.rel_l2:.4f} | {d.argmax:.1%} "
            f"| {d.first:g} of {FOLLOWING} | {d.same} of {PROMPTS} |"
        )


if __name__ == "__main__":
    main()
