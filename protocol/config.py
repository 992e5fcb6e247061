"""The node's configuration: one tree, checked once, written to the run directory, read by every process."""

import hashlib
import os
import re
from pathlib import Path
from typing import Literal

import msgspec

from phalanx.protocol.errors import ConfigError
from phalanx.protocol.limits import BLOCK_SIZE, DRAIN_MS, MAX_SEATS, OPEN_REQUESTS_MAX
from phalanx.protocol.rundir import unusable, write_whole

CONFIG_FILE = "config.json"


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_num_seqs: int = 64  # running sequences of one rank
    max_num_batched_tokens: int = 1024  # rows of one step, prefill and decode together
    prefill_watermark: float = 0.9  # prefill starts only while the KV pool is at most this full
    async_steps: bool = True  # plan the next step while one runs
    # `mixed`: prompts and outputs share steps. `ballot`: steps are of one kind, which the ranks agree on
    # by vote: for prompts every so many decode steps, if all ranks want it or if any does; and at most
    # so many prompt steps in a row while there are outputs to go on with.
    policy: Literal["mixed", "ballot"] = "mixed"
    prompt_all_steps: int = 70
    prompt_any_steps: int = 100
    prompt_steps_max: int = 4
    max_waiting: int = 4096  # sequences queued at one rank; beyond: `overloaded`
    # Prompts get as many rows of a step as keep it within this time; 0: max_num_batched_tokens.
    target_itl_ms: float = 0.0
    priority_step_ms: int = 5_000  # a level of priority is worth so much of waiting
    # Tokens between two window states that are kept in the KV store; 0: only those at ends of prompts.
    checkpoint_tokens: int = 512
    # `prompt`: every sequence ends with `length` after the one output that its prefill gives.
    # `completion`: only sequences that have outputs already are taken, the rest is refused.
    role: Literal["normal", "prompt", "completion"] = "normal"
    # Out of KV blocks, the longest output goes back to the queue and is computed again, or it ends.
    preempt: Literal["recompute", "stop"] = "recompute"


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    num_blocks: int = 0  # KV blocks of 128 tokens, null block included; 0: sized from kv_bytes
    kv_bytes: int = 0  # for KV blocks and state slots of one rank; 0: a share of what is free
    expert_slots: int = 0  # of a layer, at a rank, at most; 0: as many as there is memory for
    host_weights: bool = True  # keep the checkpoint in /dev/shm, for workers that start again
    standby: bool = True  # one process has torch imported and forks a worker when one dies
    threads: int = 1  # torch threads; part of the numerics fingerprint
    # How often a routed expert's slot is compared with the checkpoint, or a row computed again; 0: never.
    scrub_every_s: float = 0.0
    # On a GPU, `reference` runs torch operations in place of our kernels: to compare, and slow.
    kernels: Literal["auto", "reference"] = "auto"
    graphs: bool = True  # on a GPU that holds all experts, decode steps are CUDA graphs
    # Other than `off`, a prompt's early tokens skip the later layers: less work, other tokens.
    yoco_truncation: Literal["off", "mask", "compact"] = "off"  # `mask` is for comparison
    yoco_keep_tokens: int = 140  # last tokens of each prompt that do not; at least window + 6


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_open_requests: int = OPEN_REQUESTS_MAX
    journal_ttl_s: int = 3600  # finished and abandoned journal entries are deleted after this
    default_max_tokens: int = 256
    # What `phalanx replay` can run again: ended requests, the memory for their tokens, and for how long.
    history_requests: int = 1024
    history_bytes: int = 64 << 20
    history_ttl_s: int = 3600
    # How often two ranks make the beginning of an ended request again and are compared; 0: never.
    scrub_every_s: float = 0.0


class HttpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Needs the extra `http`."""

    enabled: bool = False
    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one, kept for the life of the run directory
    keys_file: str = ""  # a line each: NAME KEY [RUNNING [WAITING]]; empty: everyone may ask
    running_max: int = 2048  # requests at a time; further ones wait
    waiting_max: int = 4096  # beyond: 429
    key_running: int = 2048  # of one API key, unless its line says otherwise
    key_waiting: int = 1024
    max_body_bytes: int = 64 << 20
    request_timeout_s: float = 0.0  # for requests that bring no deadline of their own; 0: none
    keep_alive_s: float = 5.0  # a comment to a stream that has been quiet for so long
    cors_origins: tuple[str, ...] = ()  # empty: no browser of another origin


class EplbConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # Expert slots of a layer that a rank has beside those it needs: where the next placement's further
    # copies go while the one that runs is still in use. 0: experts never move while the group runs.
    spare_slots: int = 1
    rebalance: bool = True  # plans are applied; else they are only made, and shown
    period_s: float = 10.0  # a plan at most this often
    # Of a layer, in the window: fewer choices of experts say nothing of the load.
    min_rows: int = 1024
    # What a plan must gain, its moves paid for: a share of the time that the mean rank needs for its experts.
    margin: float = 0.02


class KVStoreConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    enabled: bool = True
    directory: str = ""  # default: RUN_DIR/kv
    max_bytes: int = 1 << 30
    free_floor_bytes: int = 1 << 30  # stop caching when the disk has less than this free


class NodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything a process of the node may need to know at start."""

    run_dir: str = ""
    model: str = "random-tiny"  # as the user named it; clients may name it or leave it out
    model_dir: str = ""  # the checkpoint directory it resolved to
    ranks: int = 1
    device: Literal["cpu", "cuda", "null"] = "cpu"  # null: no model, the control plane alone
    tokenizers: int = 2
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    fault_injection: bool = False
    drain_s: float = DRAIN_MS / 1000  # told to stop by a signal: so long may requests run on
    scheduler: SchedulerConfig = SchedulerConfig()
    worker: WorkerConfig = WorkerConfig()
    gateway: GatewayConfig = GatewayConfig()
    kvstore: KVStoreConfig = KVStoreConfig()
    eplb: EplbConfig = EplbConfig()
    http: HttpConfig = HttpConfig()

    @property
    def exact(self) -> bool:
        """A stream can be made again, after any fault, with the same tokens. Else it is logged."""
        return not self.inexact

    @property
    def records_steps(self) -> bool:
        """Whether small steps are recorded as CUDA graphs: where no other rank takes part in them."""
        worker = self.worker
        return (
            worker.graphs and self.device == "cuda" and self.ranks == 1 and worker.kernels == "auto"
        )

    @property
    def inexact(self) -> tuple[str, ...]:
        """Settings under which a stream may differ from what another run, or a fault, would have given."""
        found = []
        if self.worker.yoco_truncation != "off":
            mode = self.worker.yoco_truncation
            found.append(f"worker.yoco_truncation is {mode}: prompts are approximate")
        if self.scheduler.preempt == "stop":
            found.append("scheduler.preempt is stop: when memory is short, where a stream ends")
        if self.device == "cuda" and self.worker.kernels == "reference":
            found.append("worker.kernels is reference: rows may depend on their batch")
        return tuple(found)

    @property
    def run_path(self) -> Path:
        return Path(self.run_dir)

    @property
    def model_path(self) -> Path:
        return Path(self.model_dir)

    @property
    def kv_dir(self) -> Path:
        return Path(self.kvstore.directory) if self.kvstore.directory else self.run_path / "kv"

    @property
    def node(self) -> str:
        return node_name(self.run_path)

    def check(self) -> None:
        """Raises ConfigError that lists every mistake with field, value and what is allowed."""
        rules: list[tuple[str, object, bool, str]] = [
            ("ranks", self.ranks, 1 <= self.ranks <= MAX_SEATS, f"1 to {MAX_SEATS}"),
            ("drain_s", self.drain_s, 0 <= self.drain_s <= 86_400, "0 to 86400"),
            ("tokenizers", self.tokenizers, 1 <= self.tokenizers <= 32, "1 to 32"),
        ]
        s, w, g, k = self.scheduler, self.worker, self.gateway, self.kvstore
        h, e = self.http, self.eplb
        rules += [
            ("scheduler.max_num_seqs", s.max_num_seqs, 1 <= s.max_num_seqs <= 4096, "1 to 4096"),
            (
                "scheduler.max_num_batched_tokens",
                s.max_num_batched_tokens,
                s.max_num_seqs <= s.max_num_batched_tokens <= 65536,
                f"max_num_seqs ({s.max_num_seqs}) to 65536",
            ),
            (
                "scheduler.prefill_watermark",
                s.prefill_watermark,
                0 < s.prefill_watermark <= 1,
                "above 0, at most 1",
            ),
            (
                "scheduler.target_itl_ms",
                s.target_itl_ms,
                0 <= s.target_itl_ms <= 60_000,
                "0 to 60000",
            ),
            (
                "scheduler.priority_step_ms",
                s.priority_step_ms,
                0 <= s.priority_step_ms <= 3_600_000,
                "0 to 3600000",
            ),
            (
                "scheduler.checkpoint_tokens",
                s.checkpoint_tokens,
                s.checkpoint_tokens == 0 or s.checkpoint_tokens >= BLOCK_SIZE,
                f"0 or >= {BLOCK_SIZE}",
            ),
            (
                "scheduler.prompt_all_steps",
                s.prompt_all_steps,
                1 <= s.prompt_all_steps <= 65536,
                "1 to 65536",
            ),
            (
                "scheduler.prompt_any_steps",
                s.prompt_any_steps,
                1 <= s.prompt_any_steps <= 65536,
                "1 to 65536",
            ),
            (
                "scheduler.prompt_steps_max",
                s.prompt_steps_max,
                1 <= s.prompt_steps_max <= 65536,
                "1 to 65536",
            ),
            ("scheduler.max_waiting", s.max_waiting, 1 <= s.max_waiting <= 65536, "1 to 65536"),
            (
                "worker.num_blocks",
                w.num_blocks,
                w.num_blocks == 0 or w.num_blocks >= 2,
                "0 or >= 2",
            ),
            (
                "worker.kv_bytes",
                w.kv_bytes,
                w.kv_bytes == 0 or w.kv_bytes >= 1 << 20,
                "0 or >= 1 MiB",
            ),
            ("worker.expert_slots", w.expert_slots, w.expert_slots >= 0, ">= 0"),
            ("worker.threads", w.threads, 1 <= w.threads <= 256, "1 to 256"),
            (
                "worker.scrub_every_s",
                w.scrub_every_s,
                0 <= w.scrub_every_s <= 86_400,
                "0 to 86400",
            ),
            ("worker.yoco_keep_tokens", w.yoco_keep_tokens, w.yoco_keep_tokens >= 1, ">= 1"),
            ("gateway.max_open_requests", g.max_open_requests, g.max_open_requests >= 1, ">= 1"),
            ("gateway.journal_ttl_s", g.journal_ttl_s, g.journal_ttl_s >= 1, ">= 1"),
            ("gateway.default_max_tokens", g.default_max_tokens, g.default_max_tokens >= 1, ">= 1"),
            ("gateway.history_requests", g.history_requests, g.history_requests >= 0, ">= 0"),
            ("gateway.history_bytes", g.history_bytes, g.history_bytes >= 0, ">= 0"),
            ("gateway.history_ttl_s", g.history_ttl_s, g.history_ttl_s >= 0, ">= 0"),
            (
                "gateway.scrub_every_s",
                g.scrub_every_s,
                0 <= g.scrub_every_s <= 86_400,
                "0 to 86400",
            ),
            ("kvstore.max_bytes", k.max_bytes, k.max_bytes >= 16 << 20, "at least 16 MiB"),
            ("kvstore.free_floor_bytes", k.free_floor_bytes, k.free_floor_bytes >= 0, ">= 0"),
            ("eplb.spare_slots", e.spare_slots, 0 <= e.spare_slots <= 64, "0 to 64"),
            ("eplb.period_s", e.period_s, 0.1 <= e.period_s <= 86_400, "0.1 to 86400"),
            ("eplb.min_rows", e.min_rows, e.min_rows >= 1, ">= 1"),
            ("eplb.margin", e.margin, 0 <= e.margin <= 10, "0 to 10"),
            ("http.port", h.port, 0 <= h.port <= 65535, "0 to 65535"),
            ("http.running_max", h.running_max, h.running_max >= 1, ">= 1"),
            ("http.waiting_max", h.waiting_max, h.waiting_max >= 0, ">= 0"),
            ("http.key_running", h.key_running, h.key_running >= 1, ">= 1"),
            ("http.key_waiting", h.key_waiting, h.key_waiting >= 0, ">= 0"),
            ("http.max_body_bytes", h.max_body_bytes, h.max_body_bytes >= 1024, ">= 1024"),
            ("http.request_timeout_s", h.request_timeout_s, h.request_timeout_s >= 0, ">= 0"),
            ("http.keep_alive_s", h.keep_alive_s, h.keep_alive_s >= 0.1, ">= 0.1"),
        ]
        wrong = [
            f"{name} is {value!r}, allowed: {allowed}"
            for name, value, ok, allowed in rules
            if not ok
        ]
        if wrong:
            raise ConfigError("configuration: " + "; ".join(wrong))

    def save(self, name: str = CONFIG_FILE) -> Path:
        """Write it to the run directory, whole or not at all. Returns the path."""
        path = self.run_path / name
        write_whole(path, self._text())
        return path

    def save_first(self, name: str = CONFIG_FILE) -> Path:
        """`save`, of a node that is about to start. Raises ConfigError, with what to do."""
        try:
            return self.save(name)
        except OSError as error:
            raise unusable(self.run_path / name, error) from error

    def is_saved(self) -> bool:
        """Whether the run directory has it as it is here."""
        try:
            return (self.run_path / CONFIG_FILE).read_bytes() == self._text()
        except OSError:
            return False

    def _text(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2)


def load_config(run_dir: Path) -> NodeConfig:
    """The configuration of the node in `run_dir`. Raises ConfigError when absent or malformed."""
    return parse_config(run_dir / CONFIG_FILE)


def parse_config(path: Path) -> NodeConfig:
    try:
        return msgspec.json.decode(path.read_bytes(), type=NodeConfig)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ConfigError(f"configuration {path}: {error}") from error


def default_run_dir() -> Path:
    """Where the node lives unless told: $PHALANX_RUN_DIR, $XDG_RUNTIME_DIR/phalanx, /tmp/phalanx-UID."""
    if chosen := os.environ.get("PHALANX_RUN_DIR"):
        return Path(chosen)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "phalanx"
    return Path(f"/tmp/phalanx-{os.getuid()}")


def node_name(run_dir: Path) -> str:
    """The last part of the run directory and a digest of all of it: shared-memory names start with
    `ph-NAME-`, and every user may have a node in a directory that is called the same.

    Raises ConfigError when it cannot be part of a file name in /dev/shm.
    """
    name = run_dir.name
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise ConfigError(
            f"the run directory {run_dir} ends in {name!r}: its last part names shared memory, so it"
            " must be 1 to 64 of letters, digits, '.', '_' and '-'"
        )
    whole = os.fsencode(os.path.realpath(run_dir))
    return f"{name}-{hashlib.sha256(whole).hexdigest()[:8]}"
