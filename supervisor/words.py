"""What the group is told by the board: the epoch word, the topology, what is proposed; then bells are rung."""

from phalanx.protocol.board import Board
from phalanx.protocol.failpoints import failpoint
from phalanx.supervisor.events import Propose, Publish, SetEpoch


def set_epoch(board: Board, action: SetEpoch) -> None:
    epoch = action.epoch
    if epoch % 2 == 0:
        failpoint("supervisor.go.before_even")
    board.set_epoch(epoch, list(action.seats), ends_steps=action.ends_steps)
    failpoint("supervisor.go.after_even" if epoch % 2 == 0 else "supervisor.stop.after_odd")


def publish(board: Board, action: Publish) -> None:
    going = board.epoch % 2 == 1
    if going:
        failpoint("supervisor.go.before_publish")
    board.publish(action.topology)
    for seat in action.seats:
        board.seats[seat].bell.ring()
    if going:
        failpoint("supervisor.go.after_publish")


def propose(board: Board, action: Propose) -> None:
    if action.proposal is None:
        failpoint("supervisor.rebalance.before_withdraw")
        board.withdraw()
    else:
        failpoint("supervisor.rebalance.before_propose")
        board.propose(action.proposal)
    for seat in action.seats:
        board.seats[seat].bell.ring()
    if action.proposal is not None:
        failpoint("supervisor.rebalance.after_propose")
