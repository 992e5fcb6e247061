"""What the supervisor puts off while streams wait for something else: to start a process and to free memory takes
milliseconds of a CPU, and of one that starts from nothing seconds. Pure: no clock, no process."""

from collections.abc import Callable

from phalanx.supervisor.events import Spawn, Sweep

CALM_NS = 200_000_000  # how long the first steps of a new group have the CPUs for themselves
LATER_NS = 500_000_000  # how long anything is put off at most


class Later:
    """The slow actions that wait for their time.

    Args:
        forks: whether the process of this name is forked by a standby that waits, which takes a few ms.
    """

    def __init__(self, forks: Callable[[str], bool]) -> None:
        self._forks = forks
        self._actions: list[Spawn | Sweep] = []
        self._since_ns = 0
        self._calm_until_ns = 0

    def group_runs(self, now_ns: int) -> None:
        """Its first steps begin."""
        self._calm_until_ns = now_ns + CALM_NS

    def streams_wait(self, now_ns: int, changing: bool) -> bool:
        """For the group, which is `changing`, or for its first steps since."""
        return changing or now_ns < self._calm_until_ns

    def put_off(self, action: Spawn | Sweep, now_ns: int) -> None:
        if not self._actions:
            self._since_ns = now_ns
        self._actions.append(action)

    def holds(self, name: str, incarnation: int) -> bool:
        """Whether the start of this one is put off."""
        return any(
            isinstance(one, Spawn) and (one.name, one.incarnation) == (name, incarnation)
            for one in self._actions
        )

    def due(self, now_ns: int, changing: bool, spare_cpus: int) -> bool:
        """Whether it is time for them.

        Args:
            spare_cpus: what the node has beyond one for each rank that runs. A fork is made beside the first
                steps if there is one; else the successor's start would take from these what they need.
        """
        if not self._actions:
            return False
        if now_ns - self._since_ns > LATER_NS or not self.streams_wait(now_ns, changing):
            return True
        names = [action.name for action in self._actions if isinstance(action, Spawn)]
        return not changing and spare_cpus > 0 and any(map(self._forks, names))

    def take(self) -> list[Spawn | Sweep]:
        actions, self._actions = self._actions, []
        return actions
