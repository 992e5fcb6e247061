"""What the gateway answers when it is asked how the node is: what the supervisor says, and what it knows itself. Pure."""

from phalanx.protocol.messages import HealthReply, HealthUpdate


class NodeHealth:
    def __init__(self, life: int, model: str) -> None:
        self._life, self._model = life, model
        self._health = HealthUpdate(False, 0, ("the node is starting",))
        self._epoch = 0
        self._overseen = ""  # what is wrong with the supervisor, which says all the rest

    def on_epoch(self, epoch: int) -> None:
        self._epoch = max(self._epoch, epoch)

    def on_health(self, update: HealthUpdate) -> None:
        self._health = update
        self.on_epoch(update.epoch)

    def on_supervisor(self, wrong: str) -> None:
        """What is wrong with the supervisor itself, for people; empty: nothing."""
        self._overseen = wrong

    def reply(self, call: int, draining: bool, lacks: str, ended: tuple[str, ...]) -> HealthReply:
        """`lacks`: what the gateway cannot promise; `ended`: of the requests asked about."""
        health = self._health
        reasons = health.reasons
        if draining:
            reasons += ("the node is shutting down",)
        if lacks and lacks not in reasons:  # the supervisor was told, and tells it again
            reasons += (lacks,)
        if self._overseen:
            reasons += (self._overseen,)
        healthy = health.healthy and not (draining or lacks or self._overseen)
        return HealthReply(call, healthy, self._life, self._epoch, self._model, reasons, ended)
