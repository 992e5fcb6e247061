"""The two rings to the worker of one seat, made anew for each worker incarnation."""

from collections.abc import Callable

from phalanx.protocol.board import SeatRow
from phalanx.protocol.steps import Link, ToScheduler, ToWorker, WorkerHello
from phalanx.protocol.topology import Seat


class SeatLink:
    """Keeps the link number in `row`, the seat's words on the board, on a link that only the present
    worker and we use."""

    def __init__(
        self,
        row: SeatRow,
        node: str,
        seat: int,
        incarnation: int,
        make_link: Callable[[str, int, int, SeatRow], Link] = Link.create,
    ) -> None:
        self._row, self._node, self._seat, self._incarnation = row, node, seat, incarnation
        self._make_link = make_link
        self._number = 0
        self._worker = 0  # incarnation as the topology has it, 0: none seen yet
        self._hello: WorkerHello | None = None  # came before the topology knew its sender
        self._greeted = False
        self._gone = False
        self._open()

    def _open(self) -> None:
        self._number += 1
        self._greeted, self._hello = False, None
        link = (self._incarnation << 32) | self._number
        self._link = self._make_link(self._node, self._seat, link, self._row)
        self._row.link = link
        self._row.bell.ring()

    def follow(self, seat: Seat) -> bool:
        """Take the topology's word for who the worker is. True: the one that we had is gone."""
        before, self._worker = self._worker, seat.worker_incarnation
        was_gone, self._gone = self._gone, seat.state in ("lost", "absent")
        # One that had left, and need not after all, says hello on a new link: it has been given up here.
        returned = was_gone and not self._gone and not self.expects_hello
        if before not in (0, self._worker) or returned:
            self._link.close()
            self._open()
            return True
        return self._gone and not was_gone

    @property
    def expects_hello(self) -> bool:
        return not self._greeted

    def receive(self) -> list[ToScheduler]:
        """What the present worker has said. Nothing before its hello, nothing of another worker."""
        messages: list[ToScheduler] = []
        while (message := self._link.next_result()) is not None:
            if isinstance(message, WorkerHello):
                self._hello, self._greeted = message, False
            elif self._greeted:
                messages.append(message)
        if self._hello is not None and self._hello.worker_incarnation < self._worker:
            # It died before the topology named it to us; its successor takes no link that was taken.
            self._link.close()
            self._open()
        if self._hello is not None and self._is_present(self._hello):
            messages.append(self._hello)
            self._hello, self._greeted = None, True
        return messages

    def _is_present(self, hello: WorkerHello) -> bool:
        return hello.worker_incarnation == self._worker and not self._gone

    def send(self, message: ToWorker) -> None:
        self._link.send_plan(message)

    def close(self) -> None:
        self._link.close()
