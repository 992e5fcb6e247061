"""A request's way in: checked, tokenized, journalled, accepted; or refused with one error. Pure."""

from collections.abc import Callable, Sequence

from phalanx.protocol.errors import Code, Refused
from phalanx.protocol.messages import Encoded, EncodeFailed, Generate
from phalanx.services.gateway.admission import RETRY_AFTER_MS, Admission, Pending, digest_of
from phalanx.services.gateway.delivery import Delivery
from phalanx.services.gateway.logs import Logs
from phalanx.services.gateway.requests import Request
from phalanx.services.gateway.streams import ids_of
from phalanx.services.gateway.texts import EncodeJob, Texts


class Intake:
    """
    Args:
        pool_tokens: what every rank's KV pool can hold; None: not known.
    """

    def __init__(
        self,
        admission: Admission,
        texts: Texts,
        logs: Logs,
        delivery: Delivery,
        pool_tokens: Callable[[], int | None],
    ) -> None:
        self._admission, self._texts, self._logs = admission, texts, logs
        self._delivery, self._pool_tokens = delivery, pool_tokens

    def on_generate(self, client: bytes, message: Generate) -> Request | None:
        """The request that this asks for again, if it is accepted already."""
        try:
            digest = digest_of(message)
            known = self._admission.known(client, message, digest)
            if isinstance(known, Request):
                return known
            if known is not None:
                self._admission.asked_again(known, client, message)
            else:
                self._begin(self._admission.enter(client, message, digest))
        except Refused as refused:
            self._delivery.refuse(client, message.call, refused)
        return None

    def on_encoded(self, peer: bytes, message: Encoded | EncodeFailed) -> None:
        job = self._texts.on_encoded(peer, message)
        pending = self._admission.pending.get(job.key) if job is not None else None
        if pending is None:
            return
        if isinstance(message, EncodeFailed):
            self._refuse(pending, Refused(message.code, message.message))
        else:
            self._tokenized(pending, ids_of(message.token_ids))

    def on_journalled(self, pending: Pending, failure: str) -> Request | None:
        """The journal has it, or could not take it. From here on it ends with one Final a sequence, whatever happens."""
        if not failure:
            return self._admission.accept(pending)
        text = (
            f"the journal cannot be written ({failure}), so no request can be promised: make room on its"
            " disk, which phalanx status names, and send it again"
        )
        self._refuse(pending, Refused(Code.OVERLOADED, text, RETRY_AFTER_MS))
        return None

    def give_up(self, job: EncodeJob, text: str) -> None:
        """No tokenizer can do it."""
        pending = self._admission.pending.get(job.key)
        if pending is not None:
            self._refuse(pending, Refused(Code.INTERNAL, text))

    def refuse_all(self, refused: Refused) -> None:
        """All that is not on its way to the journal."""
        for pending in list(self._admission.pending.values()):
            if pending.entry is None:
                self._refuse(pending, refused)

    def _begin(self, pending: Pending) -> None:
        message = pending.message
        if message.prompt_token_ids is not None:
            self._tokenized(pending, message.prompt_token_ids)
        else:
            job = EncodeJob(pending.number, message.prompt, message.messages, message.spans)
            self._texts.encode(job)

    def _tokenized(self, pending: Pending, prompt_ids: Sequence[int]) -> None:
        fingerprint = self._logs.fingerprint
        try:
            self._admission.resolve(pending, prompt_ids, self._pool_tokens(), fingerprint)
        except Refused as refused:
            self._refuse(pending, refused)
            return
        self._logs.accept(pending)

    def _refuse(self, pending: Pending, refused: Refused) -> None:
        self._admission.refuse(pending)
        self._delivery.refuse(pending.client, pending.message.call, refused)
