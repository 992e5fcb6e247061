"""Where the end of a stream is told that did not come to its own end. Pure."""

import msgspec

from phalanx.protocol.messages import Final


def is_own(final: Final) -> bool:
    """Whether the stream came to it by itself, so that it is the same whenever it is made again."""
    return final.finish_reason in ("stop", "length") and final.code is None


def told_at(final: Final, cursor: int) -> Final:
    """An early end is told where its reader is. Who ended it may not have known how far that was: the gateway that
    the reader had its tokens from is dead, or they were on their way when he asked for what comes next. What the last
    token still owed where it was ended is no text of that place."""
    if is_own(final) or cursor <= final.offset:
        return final
    usage = msgspec.structs.replace(final.usage, completion_tokens=cursor)
    return msgspec.structs.replace(final, offset=cursor, usage=usage, text="", digest=b"")
