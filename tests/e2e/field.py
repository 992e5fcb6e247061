"""A node that is broken again and again, with the streams that it must give all the same."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from e2e.node import wait_for
from phalanx.protocol.messages import Sampling
from phalanx.services.client import Spec
from phalanx.testing.node import Node, Streams

# Of a process in a node's life here: at the ninth within a minute it would be given up.
DEATHS_MAX = 5


def specs(tokens: int) -> list[Spec]:
    """Texts and ids, short and long, one with two sequences."""
    rng = random.Random(8)
    ids = [[rng.randrange(10, 200) for _ in range(count)] for count in (1, 130, 300)]
    sampling = [Sampling(seed=i, max_tokens=tokens + 9 * i, ignore_eos=True) for i in range(5)]
    return [
        Spec("Once upon a time", sampling[0]),
        Spec("The sea", sampling[1], n=2),
        *(Spec(prompt, s) for prompt, s in zip(ids, sampling[2:], strict=True)),
    ]


@dataclass
class Field:
    """`start` makes a node; another one takes its place before its supervisor loses patience."""

    start: Callable[[], Node]
    specs: list[Spec]
    node: Node | None = None
    fault_free: Streams = field(default_factory=dict)
    deaths: Counter[str] = field(default_factory=Counter)

    def healthy_node(self, *dying: str) -> Node:
        """A healthy node in which these processes may die."""
        if self.node is None or any(self.deaths[name] >= DEATHS_MAX for name in dying):
            if self.node is not None:
                self.node.stop()
            self.node = self.start()
            self.deaths.clear()
            self.fault_free = self.fault_free or self.node.run(self.specs)
        self.deaths.update(dying)
        self.node.wait_healthy()
        return self.node

    def kill(self, victim: str) -> None:
        assert self.node is not None
        self.node.inject("kill", victim)

    def check_run(
        self, meanwhile: Callable[[], object] = lambda: None, timeout_s: float = 120
    ) -> None:
        """Run the requests with whatever was injected: every stream as without, and nothing left."""
        node = self.node
        assert node is not None
        try:
            assert node.run(self.specs, meanwhile, timeout_s) == self.fault_free
        finally:
            node.clear()
        node.wait_healthy()
        wait_for(node.whole, 60, "every block and slot back")
