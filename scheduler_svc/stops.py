"""When a sequence ends of itself. Pure.

The token that ends it is part of its outputs. Stop strings are the gateway's affair.
"""

import numpy as np
import numpy.typing as npt

from phalanx.protocol.errors import Code
from phalanx.protocol.messages import FinishReason
from phalanx.protocol.queues import QueueTable
from phalanx.scheduler_svc.state import Rows, Sequence

STATUS_ALL_BLOCKED, STATUS_NAN = 1, 2  # SampleStatus of the sampler
_ERRORS: dict[int, tuple[Code, str]] = {
    STATUS_ALL_BLOCKED: (
        Code.ALL_BLOCKED,
        "bans and masks leave no token to choose at output {}: loosen logit_bias or the stop bans",
    ),
    STATUS_NAN: (
        Code.NAN_LOGITS,
        "the model gave logits that are not numbers at output {}; the request was ended",
    ),
}


def sample_error(status: int, output: int) -> tuple[Code, str]:
    """Why no token was sampled for output number `output`, for programs and for people."""
    code, text = _ERRORS.get(
        status, (Code.INTERNAL, f"the sampler reported status {status} at output {{}}")
    )
    return code, text.format(output)


def stop_now(
    t: QueueTable, rows: Rows, tokens: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """(stopped by its end token, out of room) for each row, its newest token `tokens` counted in.

    Stop ids are few and looked at one by one (`hits_stop_id`).
    """
    count = t.output_tokens[rows]
    ended = (tokens == t.end_token[rows]) & (count >= t.min_tokens[rows])
    return ended, count >= t.max_tokens[rows]


def hits_stop_id(sequence: Sequence, token: int) -> bool:
    sampling = sequence.sampling
    enough = len(sequence.outputs) >= sampling.min_tokens
    return enough and token in sampling.stop_token_ids


def finished_already(sequence: Sequence, end_token: int) -> FinishReason | None:
    """How a resumed sequence had ended before it came here: its last token, but not its end, arrived."""
    if not sequence.outputs:
        return None
    sampling, last = sequence.sampling, sequence.outputs[-1]
    enough = len(sequence.outputs) >= sampling.min_tokens
    if enough and last == end_token and not sampling.ignore_eos:
        return "stop"
    if hits_stop_id(sequence, last):
        return "stop"
    return "length" if len(sequence.outputs) >= sequence.max_outputs else None
