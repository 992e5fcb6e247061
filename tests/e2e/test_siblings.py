"""`n > 1` on a real node: each sequence has the tokens of a request of its own, and the prompt is computed
once; a forced continuation comes back as given."""

import pytest

from e2e.node import Node, assert_whole
from phalanx.protocol.seeds import derive_seed
from phalanx.services.client import Client

pytestmark = pytest.mark.process

PROMPT = [3 + (5 * at) % 200 for at in range(150)]
SEED, N, OUTPUTS = 77, 4, 12


def test_sequences_of_one_request(node: Node) -> None:
    def sampling(seed: int, **more: object) -> dict[str, object]:
        return {"max_tokens": OUTPUTS, "ignore_eos": True, "seed": seed, **more}

    with Client(node.run_dir) as client:
        together = client.generate(PROMPT, n=N, **sampling(SEED)).results()
        alone = [
            client.generate(PROMPT, **sampling(derive_seed(SEED, index))).results()[0]
            for index in range(N)
        ]
        forced = client.generate(PROMPT, **sampling(1, forced_token_ids=(9, 8, 7))).results()[0]
    by_index = sorted(together, key=lambda result: result.index)
    assert [r.token_ids for r in by_index] == [r.token_ids for r in alone]
    assert len({r.token_ids for r in alone}) == N  # seeds tell them apart
    assert forced.token_ids[:3] == (9, 8, 7) and len(forced.token_ids) == OUTPUTS
    assert_whole(node)
