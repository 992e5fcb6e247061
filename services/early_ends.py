"""Where the end of a stream is told that did not come to its own end. Pure."""

import msgspec

from phalanx.protocol.messages import Final


def told_at(final: Final, cursor: int) -> Final:
    """An early end is told where its reader is. Who ended it may not have known how far that was: the gateway that
    the reader had its tokens from is dead, or they were on their way when he asked for what comes next."""
    if final.finish_reason in ("stop", "length") or cursor <= final.offset:
        return final
    usage = msgspec.structs.replace(final.usage, completion_tokens=cursor)
    return msgspec.structs.replace(final, offset=cursor, usage=usage, digest=b"")
