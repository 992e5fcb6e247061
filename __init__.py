"""Phalanx serves DeepSeek-V4.1-class mixture-of-experts models; any rank may fall, no token changes.

This file is the root of the import package: `protocol/` on disk is `phalanx.protocol`. It loads nothing until
a name is asked for, since control processes must start fast.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.supervisor.llm import LLM

__all__ = ["LLM"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from phalanx.supervisor.llm import LLM

        return LLM
    raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
