"""Log-probabilities of a prompt on their way from the worker to the gateway: fixed records, not objects.

A prompt of 16,000 tokens with 20 alternatives each is 2.7 MB so. The record of prompt token p, from
p = 1 on (nothing precedes token 0), is little-endian: float32 logprob, int32 rank, int32 [k] ids of the
likeliest, float32 [k] their logprobs. An id of -1: there are no more.
"""

import struct
from functools import lru_cache

from phalanx.protocol.limits import RING_BYTES
from phalanx.protocol.messages import PromptLogprob

# Of one step, so that results under way fit into the ring, tokens included.
STEP_BYTES_MAX = RING_BYTES // 4


def record_bytes(num_top: int) -> int:
    return 8 + 8 * num_top


@lru_cache
def _layout(num_top: int) -> struct.Struct:
    return struct.Struct(f"<fi{num_top}i{num_top}f")


def entries(records: bytes | memoryview, num_top: int) -> tuple[PromptLogprob, ...]:
    """The records as clients get them."""
    found = []
    for logprob, rank, *best in _layout(num_top).iter_unpack(records):
        ids = tuple(token for token in best[:num_top] if token >= 0)
        found.append(PromptLogprob(logprob, rank, ids, tuple(best[num_top : num_top + len(ids)])))
    return tuple(found)
