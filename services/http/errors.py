"""Refusals as HTTP says them: a status, and a body in the words of the API that was called. Pure."""

from typing import Any

from phalanx.protocol.errors import Code, PhalanxError, Refused
from phalanx.services.client_flow import GatewaySilent, RequestTimeout

RETRY_S = 1
_STATUS = {
    Code.BAD_REQUEST: 400,
    Code.ALL_BLOCKED: 400,
    Code.UNKNOWN_MODEL: 404,
    Code.UNKNOWN_REQUEST: 404,
    Code.SLOW_CLIENT: 408,
    Code.TOO_LARGE: 413,
    Code.OVERLOADED: 429,
    Code.NAN_LOGITS: 500,
    Code.INTERNAL: 500,
    Code.STREAM_CHANGED: 500,
    Code.NOT_READY: 503,
    Code.SHUTDOWN: 503,
    Code.KV_PRESSURE: 503,
    Code.TIME_LIMIT: 504,
}
_OPENAI_TYPES = {401: "authentication_error", 429: "rate_limit_error", 504: "timeout_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class HttpError(PhalanxError):
    """What a client is told. `param` names the field that was wrong, where there is one."""

    def __init__(
        self, status: int, code: str, text: str, *, param: str | None = None, retry_after_s: int = 0
    ) -> None:
        super().__init__(text)
        self.status, self.code, self.text = status, code, text
        self.param, self.retry_after_s = param, retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self.retry_after_s)} if self.retry_after_s else {}


def bad(text: str, param: str | None = None) -> HttpError:
    return HttpError(400, "bad_request", text, param=param)


def of_code(code: Code, text: str, retry_after_ms: int = 0) -> HttpError:
    status = _STATUS[code]
    retry_after_s = -(-retry_after_ms // 1000)
    if status in (429, 503):
        retry_after_s = max(retry_after_s, RETRY_S)
    return HttpError(status, code.value, text, retry_after_s=retry_after_s)


def of(error: PhalanxError) -> HttpError:
    """How a failure of the gateway's client reads over HTTP."""
    match error:
        case HttpError():
            return error
        case Refused():
            return of_code(error.code, error.text, error.retry_after_ms)
        case RequestTimeout():
            return HttpError(504, "timeout", str(error))
        case GatewaySilent():
            return HttpError(503, "not_ready", str(error), retry_after_s=RETRY_S)
    return HttpError(500, "internal", str(error))


def openai_body(error: HttpError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    kind = _OPENAI_TYPES.get(error.status, kind)
    return {
        "error": {"message": error.text, "type": kind, "param": error.param, "code": error.code}
    }


def anthropic_body(error: HttpError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(error.status, kind)
    return {"type": "error", "error": {"type": kind, "message": error.text}}
