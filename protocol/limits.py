"""Every bound of the node in one place, and what happens when it is hit."""

# Wire. A longer frame ends its sender's connection: ZeroMQ does not even read it, so nobody can answer.
MESSAGE_BYTES_MAX = 32 << 20
BUS_MESSAGE_BYTES_MAX = 256 << 20  # between our own processes (a long prompt on its way to a rank)
SOCKET_HWM = 4096  # messages; a full socket is handled by its sender, never dropped in silence
IPC_PATH_BYTES_MAX = 107  # sun_path of a Unix socket, less its terminator

# Requests. Outside these: `bad_request` with both numbers.
SEED_MAX = 2**53 - 1  # every JSON number type holds it exactly
N_MAX = 64
STOP_STRINGS_MAX = 16
STOP_STRING_CHARS_MAX = 256
STOP_IDS_MAX = 64
LOGIT_BIAS_MAX = 1024
BLOCKED_IDS_MAX = 1024
TOP_LOGPROBS_MAX = 20
PROMPT_CHARS_MAX = 30_000_000
KEY_CHARS_MAX = 128  # the client's idempotency key
MODEL_NAME_CHARS_MAX = 256

# Gateway. Beyond: `overloaded` with a time to retry after.
OPEN_REQUESTS_MAX = 16_384
CLIENT_STALL_MS = 30_000  # a client that takes nothing for this long loses its streams

# Commands between processes are repeated until acknowledged, this often.
COMMAND_RETRY_MS = 500

# A scheduler tells what it runs in messages of so many sequences and bytes of outputs, but of one sequence at least.
LIST_SEQUENCES_MAX = 512
LIST_BYTES_MAX = 1 << 20

# Supervision.
# How often a healthy process proves that it is alive. One that first waits for a CPU, unseen, and then sleeps for so
# long is not to be a suspect yet (`patience.py`).
BEAT_PERIOD_MS = 250
HEALTH_REPEAT_MS = 2_000  # the gateway is told the node's health again, in case a word was lost
TROUBLE_MS = 3 * HEALTH_REPEAT_MS  # what a process lacks counts as over when it is not said again
# A process without progress for this long is killed: noticed and done within 1.5 s, two looks at it and a lost CPU
# slice included.
HANG_MS = 1_350
SUSPECT_MS = 450  # of silence, in its own time as far as known: health names it within a second
TOLD_MS = 5_000  # of silence, whatever the reason: health names it
# A rank that peers wait for may sleep in the kernel for so long at a stretch (a page from a disk, a driver).
# A full queue of a slow disk takes a second or two; the kernel's own limit for an answer is 30 s. To lose the
# rank costs about as much as this wait: its sequences are computed again, its successor loads for seconds.
STALLED_MS = 10_000
STALL_TOLD_MS = 1_000  # of one such sleep: health names it
# A process that waits for a CPU or a disk is given this much longer at most.
STARVED_MS_MAX = 30_000
# CPU time that a service may use between two signs of life. The longest pass of a scheduler is some ms, of the
# others some tens of ms: what takes longer runs in threads beside their loops.
SPIN_MS = 5_000
SPIN_SUSPECT_MS = 600  # health names it
BUSY_SILENCE_MS = 30_000  # busy, and with no progress; or one long call where calls are long
START_DEADLINE_MS = 120_000  # from spawn to ready; a load that reports progress is not cut
STOP_ACK_MS = 1_000  # a survivor that does not acknowledge STOP by then is lost too
# How long the step under way is waited for when the group changes though nobody fell: a rank comes or goes. Then it is
# abandoned, as when somebody falls.
STEP_END_MS = 400
# A survivor that is not ready for the new epoch is lost when it has done nothing for so long: to load another
# expert is something.
GO_ACK_MS = 20_000
# A plan of the planner is withdrawn when no rank has got on with its copies for so long, or when they took so
# long in all; when ranks that have them take so many steps without it; or none in so long a time.
COPY_MS = 30_000
COPY_MS_MAX = 600_000
FLIP_STEPS = 64
FLIP_IDLE_MS = 60_000
# Restarts of one process within RESTART_WINDOW_MS, since it last served for RESTART_SERVED_MS; one more and the node
# fails.
RESTARTS_MAX = 8
RESTART_WINDOW_MS = 60_000
RESTART_DELAY_MS = 100  # before the second restart within the window; doubles with each further one
RESTART_DELAY_MS_MAX = 5_000
RESTART_SERVED_MS = 5_000  # ready for so long: whatever ended it, it is not its start
# The longest pause before a rank joins again whose workers fell one after the other while they joined.
REJOIN_MS_MAX = 600_000
NEWCOMER_STARTS = 3  # of a process that a scale or a restart waits for; then that has failed
# While shared memory is full a process is started again and again, however often: nothing else is wrong
# with it. The first pause, doubled each time, and the longest.
ROOM_DELAY_MS = 500
ROOM_DELAY_MS_MAX = 8_000
DRAIN_MS = 10_000  # default time to finish running requests at shutdown
TERM_GRACE_MS = 2_000  # from SIGTERM to SIGKILL
# From the end of the drain to SIGKILL for the gateway: the ends are told within a second, and if it dies or hangs
# just then there is time for one that tells them in its place.
DRAIN_GRACE_MS = 6_000
STANDBY_MS = 15_000  # a process that is to be replaced waits so long for its successor to have imported everything
HTTP_DRAIN_MS = 30_000  # for HTTP when it is restarted: replies that have begun are finished
HAND_OVER_MS = 1_000  # for a gateway that is replaced: what is on its way to the journal's disk
CHANGE_S_MAX = 86_400.0  # the longest time that a scale or a restart may be given
# From SIGKILL to giving up on a process that the kernel does not let go: one with tens of GiB on a GPU takes seconds.
KILL_GRACE_MS = 20_000
# The kernel sends SIGKILL to the children of a killed supervisor; a start waits for them as long.
OLD_NODE_MS = KILL_GRACE_MS
# A scale that failed goes back: STOP and GO without the newcomers, their SIGTERM, their SIGKILL. Who did not even
# leave the group by then is killed, and after as long again, but for the group, everything is told.
BACK_MS = 6 * STOP_ACK_MS + TERM_GRACE_MS + KILL_GRACE_MS
BACK_MS_MAX = 2 * BACK_MS
# From the end of the drain to the answer of a supervisor that was told to stop; the rest is for freeing memory.
STOPPED_MS = DRAIN_GRACE_MS + TERM_GRACE_MS + KILL_GRACE_MS + 10_000

MAX_SEATS = 64  # ranks of one node: one bit each in the membership mask
MAX_PROCESSES = 256  # rows of the heartbeat table
FAULTS_MAX = 64  # made on purpose in one process at a time
RING_BYTES = 4 << 20  # result ring of one rank
# Its plan ring: two plans lie unread in it, and as much as a third may take is left out before its end.
PLAN_RING_BYTES = 8 << 20
PLAN_BYTES_MAX = PLAN_RING_BYTES // 3 - 64
TOPOLOGY_BYTES_MAX = 1 << 20
EXPERT_FINDINGS_MAX = 64  # that one worker tells of at a time
BLOCK_SIZE = 128  # tokens of a KV block
# A rank that waits longer for its peers ends itself. The supervisor finds out who keeps the group waiting, so
# this is longer than whatever it gives to any rank: it only acts when the supervisor's eyes fail.
EXCHANGE_DEADLINE_MS = 4 * START_DEADLINE_MS
