"""Requests over which the gateway itself falls: a bug that an accepted one meets must not fell each next gateway.

A gateway that crashes dies, as what it holds may be broken, and the next one goes on with every request. So one that
is met again is met by each of them, until the node gives up. Therefore a gateway that crashes leaves word of the
request that it was at work on, and one that has felled two gateways is ended by the third, before that looks at it.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType

import msgspec

from phalanx.protocol.rundir import write_whole
from phalanx.services.gateway.entries import Entry, Recovered
from phalanx.services.gateway.requests import Request
from phalanx.services.gateway.streams import Stream

POISON_FILE = "gateway-fell.json"
CRASHES_MAX = 2
_KEPT = 64  # requests, the newest


def crashes(run_dir: Path) -> dict[str, int]:
    """How many gateways crashed while at work on each request."""
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((run_dir / POISON_FILE).read_bytes(), type=dict[str, int])
    return {}


def given_up(counted: Mapping[str, int]) -> dict[str, str]:
    """Those to be ended, and why, for people."""
    return {
        request_id: f"{count} gateways crashed while they were at work on it (logs/gateway.log says how): it is given"
        " up, so that the others can go on"
        for request_id, count in counted.items()
        if count >= CRASHES_MAX
    }


def note_crash(run_dir: Path, error: BaseException) -> str:
    """Leave word of the request that was being worked on. Returns its id, empty when there is none to blame."""
    blameless = isinstance(error, MemoryError | OSError)  # the machine lacks something
    request_id = "" if blameless else _at_work_on(error)
    if request_id:
        counted = crashes(run_dir)
        counted[request_id] = counted.pop(request_id, 0) + 1
        newest = dict([*counted.items()][-_KEPT:])
        with suppress(OSError):  # the disk may be full: then it fells some more
            write_whole(run_dir / POISON_FILE, msgspec.json.encode(newest))
    return request_id


def _at_work_on(error: BaseException) -> str:
    """The request that the innermost function was given that was given one."""
    found, trace = "", error.__traceback__
    while trace is not None:
        for value in _arguments(trace.tb_frame):
            match value:
                case Stream() | Request() | Entry():
                    found = value.request_id
                case Recovered():
                    found = value.entry.request_id
                case _:
                    pass
        trace = trace.tb_next
    return found


def _arguments(frame: FrameType) -> list[object]:
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [frame.f_locals[name] for name in names if name in frame.f_locals]
