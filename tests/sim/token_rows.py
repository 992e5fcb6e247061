"""Rows of a Tokens message as items, for those who look at what a scheduler says."""

from phalanx.protocol.messages import Tokens, TokensItem


class Handles:
    """What one incarnation of a scheduler has named so far."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[str, int, int]] = {}

    def items(self, message: Tokens) -> list[TokensItem]:
        """All of the message in its order; rows of unknown handles are left out."""
        found: list[TokensItem] = []
        for handle, offset, token_ids in message.rows.each():
            if handle in self._names:
                found.append(TokensItem(*self._names[handle], offset, token_ids))
        for item in message.items:
            if item.handle:
                self._names[item.handle] = (item.request_id, item.index, item.attempt)
            found.append(item)
        return found
