"""What a store finds on its disk at the start. Sealed segments are believed by their checksummed index,
others are scanned record by record and then sealed, so that a crash costs one scan once.
"""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from phalanx.kvstore_svc.layout import (
    PAGE,
    Buffer,
    IndexEntry,
    SegmentHead,
    decode_index,
    decode_segment_head,
    decode_tail,
    end_of,
    scan,
)


class SegmentFiles(Protocol):
    """The disk as recovery needs it: the real one and the simulated one."""

    store_id: bytes

    def segments(self) -> list[int]: ...
    def size(self, segment: int) -> int: ...
    def written_ns(self, segment: int) -> int: ...
    def load(self, segment: int, offset: int, nbytes: int) -> Buffer:
        """Bytes of the file; fewer at its end. Raises OSError."""

    def seal(self, head: SegmentHead, entries: Sequence[IndexEntry], offset: int) -> int:
        """Write index and tail at `offset`, cut the file behind them, sync; its new size. Raises OSError."""

    def delete(self, segment: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Found:
    """A segment and the records that it holds, all of them intact."""

    head: SegmentHead
    nbytes: int  # of its file
    entries: list[IndexEntry]
    written_ns: int  # wall clock of the last change of its file
    synced: bool = True  # False: they may still be in the disk's cache only


@dataclass(frozen=True, slots=True)
class Recovery:
    found: list[Found]
    scanned: int  # segments without a valid index
    discarded: int  # files without any record of this store and version


def recover(
    files: SegmentFiles, progress: Callable[[float], None] = lambda fraction: None
) -> Recovery:
    """Read all segments, oldest first. A file with bad sectors or without records is deleted.

    Raises OSError for what is not the file's fault (permissions, open files): nothing is deleted then.
    """
    found: list[Found] = []
    scanned = discarded = 0
    segments = sorted(files.segments())
    for number, segment in enumerate(segments):
        progress(number / len(segments))
        try:
            one, was_sealed = _read(files, segment)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            one, was_sealed = None, True
        scanned += not was_sealed
        if one is None:
            discarded += 1
            files.delete(segment)
        else:
            found.append(one)
    return Recovery(found, scanned, discarded)


def _read(files: SegmentFiles, segment: int) -> tuple[Found | None, bool]:
    """The segment, and whether its index was valid."""
    nbytes = files.size(segment)
    head = decode_segment_head(files.load(segment, 0, PAGE))
    if head is None or (head.store_id, head.segment) != (files.store_id, segment):
        return None, True
    written_ns = files.written_ns(segment)
    entries = _indexed(files, head, nbytes)
    if entries is not None:
        return (Found(head, nbytes, entries, written_ns) if entries else None), True
    entries = list(scan(files.load(segment, 0, nbytes), head))
    if not entries:
        return None, False
    try:
        # The sync inside makes durable what a crash of the process alone left in the disk's cache.
        nbytes = files.seal(head, entries, end_of(entries))
    except OSError:  # a full or failing disk: the records are served all the same
        return Found(head, nbytes, entries, written_ns, synced=False), False
    return Found(head, nbytes, entries, written_ns), False


def _indexed(files: SegmentFiles, head: SegmentHead, nbytes: int) -> list[IndexEntry] | None:
    if nbytes % PAGE or nbytes < 2 * PAGE:
        return None
    tail = decode_tail(files.load(head.segment, nbytes - PAGE, PAGE), head, nbytes)
    if tail is None:
        return None
    return decode_index(files.load(head.segment, tail.offset, tail.index_bytes), tail)
