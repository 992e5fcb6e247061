"""Perplexity of a fixed text: a small number that moves when the model's numbers do.

`python -m phalanx.bench.perplexity` compares with the stored values, `--refresh` replaces them; both
show old, new and the difference. With random weights a value means nothing by itself.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Final

import msgspec
import torch
from tokenizers import Tokenizer

from phalanx.worker_svc.model.random_tiny import ensure_random_tiny
from phalanx.worker_svc.model.reader import Reader, open_reader

GOLDEN: Final = Path(__file__).parents[1] / "tests" / "golden"
STORED: Final = GOLDEN / "perplexity.json"
MODELS: Final = ("tiny-a", "random-tiny")
TOLERANCE: Final = 0.15  # nats a token: on other processors, which add in another order; noise of
# 1e-6 in the weights, which is as much, moves tiny-a by 0.005 and random-tiny by 0.05
PORTION: Final = 64
_STUB_TOKENS: Final = 200

TEXT: Final = """\
A phalanx holds because every shield covers the next. When one falls, the ranks close, and whoever
looks from outside sees the same front as before. So it is with a group of machines that answer
questions together: each holds some of the experts, each word passes through several of them, and
none can speak alone. If one of them stops, the others must not start the sentence again, nor end it
otherwise. The next word is a function of the words before it, of a seed, and of nothing else: not of
the neighbours in the batch, not of how the text was cut into portions, not of the place where an
expert happens to live. Then a lost machine costs a moment, and no reader ever knows.
"""


class Stored(msgspec.Struct, frozen=True):
    made_on: str
    perplexity: dict[str, float]


def model_dir(name: str) -> Path:
    return GOLDEN / name if name == "tiny-a" else ensure_random_tiny()


def text_ids(directory: Path) -> list[int]:
    """The text in the model's own tokens; where the vocabulary is a stub, its first bytes as ids."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(TEXT, add_special_tokens=False).ids
    return ids if len(ids) > 1 else list(TEXT.encode()[:_STUB_TOKENS])


def perplexity(reader: Reader, ids: list[int], portion: int = PORTION) -> float:
    """exp of the mean negative log-likelihood of all tokens after the first."""
    logprobs = reader.score(ids, portion).logprobs.double()
    return math.exp(-float(logprobs.mean()))


def measure(name: str) -> float:
    directory = model_dir(name)
    ids = text_ids(directory)
    return perplexity(open_reader(directory, len(ids)), ids)


def here() -> str:
    """What decides the order of additions, besides this code."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), ""
    )
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def agrees(old: float, new: float, made_on: str) -> bool:
    """Equal on a machine like the one that made the stored value, else near it."""
    return old == new if made_on == here() else abs(math.log(new / old)) <= TOLERANCE


def load_stored() -> Stored:
    return msgspec.json.decode(STORED.read_bytes(), type=Stored)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Perplexity of a fixed text against stored values."
    )
    parser.add_argument("--refresh", action="store_true", help="store the new values")
    refresh = parser.parse_args().refresh
    torch.set_num_threads(1)
    stored = load_stored() if STORED.exists() else Stored("", {})
    found = {name: measure(name) for name in MODELS}
    for name, new in found.items():
        old = stored.perplexity.get(name, math.nan)
        print(f"{name:12} old {old:.6f}  new {new:.6f}  difference {new - old:+.6f}")
    if refresh:
        content = msgspec.json.encode(Stored(here(), found))
        STORED.write_bytes(msgspec.json.format(content, indent=2) + b"\n")
        return
    print(f"stored values: {stored.made_on}")
    known = stored.perplexity
    if not all(
        name in known and agrees(known[name], found[name], stored.made_on) for name in found
    ):
        print("the values changed: if that is meant, --refresh", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
