"""Offline use from Python, the way evaluation scripts do it: `with phalanx.LLM("tiny") as llm: llm.generate([...])`.

The node is the script's own: it starts with the object and ends with it, or with the script however that ends.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from phalanx.protocol.errors import PhalanxError
from phalanx.protocol.messages import ChatMessage, Sampling
from phalanx.services.client import Client, Result, Spec, make_spec
from phalanx.services.client_flow import Prompt
from phalanx.supervisor.commands.node import private_node


@dataclass(frozen=True)
class Output:
    """What came of one prompt."""

    prompt: Prompt
    sequences: tuple[Result, ...]  # by index of `n`

    @property
    def text(self) -> str:
        """Of the first sequence. Raises PhalanxError when the request was refused or failed."""
        self.check()
        return self.sequences[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the first sequence. Raises as `text`."""
        self.check()
        return self.sequences[0].token_ids

    def check(self) -> None:
        """Raises PhalanxError unless every sequence came to its own end."""
        for result in self.sequences:
            if result.error:
                raise PhalanxError(result.error)


class LLM:
    """A private node and a client of it.

    Args:
        model: A name (`tiny`, `random-tiny`) or a checkpoint directory.
        ranks: Workers; the experts are spread over them. No token depends on it.

    Raises:
        PhalanxError: The node did not start; the message says why.
    """

    def __init__(self, model: str = "random-tiny", *, ranks: int = 1) -> None:
        self._stack = ExitStack()
        try:
            config, _ = self._stack.enter_context(private_node(model, ranks))
            self._client = self._stack.enter_context(Client(config.run_path))
        except BaseException:
            self._stack.close()
            raise

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt | Spec],
        *,
        n: int = 1,
        timeout: float | None = None,
        **sampling: Any,
    ) -> list[Output]:
        """Complete every prompt; the outputs stand in their order.

        Args:
            prompts: Texts, lists of token ids, or `Spec`s with sampling of their own; or one text.
            n: Sequences of each prompt.
            timeout: Seconds for each request.
            sampling: Any field of `Sampling`, for all prompts that are no `Spec`.

        A request that is refused or fails is an Output whose `text` raises; the others are served.
        """
        many: Iterable[Any] = [prompts] if isinstance(prompts, str) else prompts
        specs = [make_spec(prompt, n, False, "", "", sampling) for prompt in many]
        found: dict[int, list[Result]] = {at: [] for at in range(len(specs))}
        for position, result in self._client.generate_many(specs, timeout=timeout):
            found[position].append(result)
        return [
            Output(spec.prompt, tuple(sorted(found[at], key=lambda result: result.index)))
            for at, spec in enumerate(specs)
        ]

    def chat(self, messages: Sequence[ChatMessage | dict[str, str]], **options: Any) -> Output:
        """The next turn of one conversation. `options` are those of `generate`."""
        chat = [m if isinstance(m, ChatMessage) else ChatMessage(**m) for m in messages]
        sampling = {name: value for name, value in options.items() if name not in ("n", "timeout")}
        spec = make_spec(chat, options.get("n", 1), False, "", "", sampling)
        (output,) = self.generate([spec], timeout=options.get("timeout"))
        return output

    def close(self) -> None:
        """Stop the node. Harmless when it is stopped already."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


__all__ = ["LLM", "Output", "Sampling", "Spec"]
