"""Whether a sequence can be served here at all. Pure. What can never fit is refused with the numbers."""

from collections.abc import Iterable

import numpy as np

from phalanx.protocol.config import SchedulerConfig
from phalanx.protocol.errors import Code, Refused
from phalanx.protocol.introductions import check_introduced
from phalanx.protocol.limits import N_MAX, STOP_IDS_MAX
from phalanx.protocol.messages import Sampling, Submit
from phalanx.protocol.queues import REQUEST_ID_BYTES
from phalanx.protocol.steps import WorkerHello
from phalanx.scheduler_svc.blocks import blocks_for
from phalanx.scheduler_svc.rank import Rank
from phalanx.scheduler_svc.state import Sequence, sequence_of

RETRY_AFTER_MS = 500


def admit(
    submit: Submit,
    worker: WorkerHello | None,
    rank: Rank,
    config: SchedulerConfig,
    serial: int,
    now_ns: int,
) -> Sequence:
    """The sequence of `submit`, ready to be queued. Raises Refused.

    A resumed sequence was accepted before: the bound on the queue is not for it, as long as the table
    has a row, and it goes ahead of arrivals.
    """
    if worker is None:
        raise Refused(Code.NOT_READY, "this rank has no worker in the group now", RETRY_AFTER_MS)
    if rank.table.free == 0 or (not submit.resumed and rank.num_waiting >= config.max_waiting):
        raise Refused(
            Code.OVERLOADED,
            f"{rank.num_waiting} sequences wait at this rank, the limit is {config.max_waiting}",
            RETRY_AFTER_MS,
        )
    _check_ids(submit, worker.vocab_size)
    max_outputs = _room(submit, worker, rank.pool.total)
    if config.role == "prompt":
        max_outputs = min(max_outputs, len(submit.outputs) // 4 + 1)
    elif config.role == "completion" and not submit.outputs:
        raise Refused(
            Code.BAD_REQUEST,
            "this node continues sequences (scheduler.role: completion) and this one has no output"
            " yet: send the prompt to a node with role prompt or normal",
        )
    # Priority is a head start, not a class: of the resumed ones, as of the arrivals, whoever has waited
    # longer than that goes first all the same.
    head_start_ns = submit.priority * config.priority_step_ms * 1_000_000
    order = (0 if submit.resumed else 1, now_ns - head_start_ns, serial)
    sequence = sequence_of(submit, max_outputs, order, now_ns)
    check_introduced(sequence.num_prompt, max_outputs, sequence.settings_bytes)
    return sequence


def _room(submit: Submit, worker: WorkerHello, total_blocks: int) -> int:
    """How many outputs the sequence may have. Raises Refused when it could never be finished."""
    prompt, wanted = len(submit.prompt) // 4, submit.sampling.max_tokens
    least = 0 if wanted == 0 and submit.sampling.prompt_logprobs is not None else 1
    left = worker.max_model_len - prompt
    if left < least:
        raise Refused(
            Code.BAD_REQUEST,
            f"the prompt has {prompt} tokens, the model takes {worker.max_model_len}"
            " together with at least one output",
        )
    max_outputs = left if wanted is None else min(wanted, left)
    if max_outputs < least:
        raise Refused(Code.BAD_REQUEST, f"max_tokens is {wanted}, at least 1 is needed")
    needed = blocks_for(prompt + max(max_outputs - 1, 0))  # the last output is never fed back
    if needed > total_blocks:
        raise Refused(
            Code.BAD_REQUEST,
            f"{prompt} prompt tokens and up to {max_outputs} outputs need {needed} KV blocks, the pool"
            f" has {total_blocks}: shorten the prompt, lower max_tokens or give the node more kv_bytes",
        )
    return max_outputs


def _check_ids(submit: Submit, vocab_size: int) -> None:
    """Every id that will index something on the worker. Raises Refused."""
    try:
        well_named = len(bytes.fromhex(submit.request_id)) == REQUEST_ID_BYTES
    except ValueError:
        well_named = False
    if not well_named:
        raise Refused(Code.BAD_REQUEST, f"request id {submit.request_id!r} is not 32 hex digits")
    if not 0 <= submit.index < N_MAX or not 0 <= submit.attempt < 1 << 62:
        raise Refused(
            Code.BAD_REQUEST,
            f"index {submit.index} is not below {N_MAX}, or attempt {submit.attempt} is absurd",
        )
    if not submit.prompt or len(submit.prompt) % 4 or len(submit.outputs) % 4:
        raise Refused(Code.BAD_REQUEST, "prompt and outputs are int32 ids, the prompt at least one")
    sampling = submit.sampling
    if len(sampling.stop_token_ids) > STOP_IDS_MAX:
        raise Refused(
            Code.BAD_REQUEST,
            f"{len(sampling.stop_token_ids)} stop ids, at most {STOP_IDS_MAX} are allowed",
        )
    _check_packed(submit.prompt, vocab_size)
    _check_packed(submit.outputs, vocab_size)
    ids = (
        *sampling.stop_token_ids,
        *sampling.logit_bias,
        *sampling.blocked_token_ids,
        *sampling.predicted_token_ids,
        *sampling.forced_token_ids,
    )
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        raise _wrong_id(sampling, vocab_size)


def _check_packed(ids: bytes, vocab_size: int) -> None:
    # Read as unsigned, a negative id is a very large one.
    if ids and np.maximum.reduce(np.frombuffer(ids, np.uint32)) >= vocab_size:
        raise _outside("token", np.frombuffer(ids, np.int32).tolist(), vocab_size)


def _wrong_id(sampling: Sampling, vocab_size: int) -> Refused:
    for name, ids in (
        ("stop", sampling.stop_token_ids),
        ("logit_bias", sampling.logit_bias),
        ("blocked", sampling.blocked_token_ids),
        ("predicted", sampling.predicted_token_ids),
    ):
        if ids and (min(ids) < 0 or max(ids) >= vocab_size):
            return _outside(name, ids, vocab_size)
    return _outside("forced", sampling.forced_token_ids, vocab_size)


def _outside(name: str, ids: Iterable[int], vocab_size: int) -> Refused:
    wrong = next(token for token in ids if not 0 <= token < vocab_size)
    return Refused(Code.BAD_REQUEST, f"{name} id {wrong} is outside the vocabulary of {vocab_size}")
