"""How large a sequence may be for a plan to tell a worker of it, with all its tokens and settings. Pure.

The gateway refuses what is larger; a scheduler, which fills the plans, looks once more.
"""

import msgspec

from phalanx.protocol.errors import Code, Refused
from phalanx.protocol.messages import Sampling

# A plan carries all tokens and settings of its new sequences; what is left of `PLAN_BYTES_MAX` is for the rest of it.
PLAN_NEW_BYTES_MAX = 2 << 20
_encoder = msgspec.msgpack.Encoder()


def introduction_bytes(sampling: Sampling) -> int:
    """What a new sequence takes in a plan beside its tokens, at most."""
    return 64 + len(_encoder.encode(sampling))


def check_introduced(prompt: int, outputs: int, beside: int) -> None:
    """A plan can tell the worker of it, also after it has moved with all its outputs. Raises Refused."""
    if 4 * (prompt + outputs) + beside > PLAN_NEW_BYTES_MAX:
        raise Refused(
            Code.BAD_REQUEST,
            f"{prompt} prompt tokens and up to {outputs} outputs, of 4 bytes each, with {beside} bytes of settings are"
            f" more than the {PLAN_NEW_BYTES_MAX} bytes that one sequence may have: leave out predicted_token_ids or"
            " forced_token_ids, or lower max_tokens",
        )
