"""`phalanx up`, `down`, `status`: the life of a node."""

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import click
import msgspec

from phalanx.protocol.arena import TOKENS, kind_of, names, sweep
from phalanx.protocol.config import NodeConfig, parse_config
from phalanx.protocol.errors import ConfigError, ExitCode, PhalanxError
from phalanx.protocol.limits import DRAIN_MS, START_DEADLINE_MS, STOPPED_MS
from phalanx.protocol.messages import Shutdown, ShutdownDone, StatusQuery, StatusReply
from phalanx.protocol.rundir import LOG_DIR, is_running, open_output, prepare
from phalanx.services.http.address import read_address, url
from phalanx.supervisor.ask import NoAnswer, NodeGone, NoNode, ask, find_run_dir, why_silent
from phalanx.supervisor.commands.common import (
    check_seconds,
    console,
    errors,
    finish,
    json_option,
    print_json,
    run_dir_option,
)
from phalanx.supervisor.commands.plan import memory_plan
from phalanx.supervisor.headway import Headway, Waits, waiting_for
from phalanx.supervisor.lock import (
    FAILED_FILE,
    forget_failure,
    holders,
    of_earlier_node,
    read_pid,
    sweep_dead,
)

_SUPERVISOR = [sys.executable, "-P", "-m", "phalanx.supervisor"]
_POLL_S = 0.05
_STATUS_S = 2.0
_OLD_EVERY_S = 1.0  # between two looks for what keeps a supervisor from starting
_PRIVATE_DRAIN_S = 5.0
_END_S = 60.0  # what a supervisor takes at most to end once its node has


@click.command()
@click.option("--model", default=None, help="tiny, random-tiny or a checkpoint directory.")
@click.option("--ranks", type=int, default=None, help="Workers; the experts are spread over them.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda", "null"]),
    default=None,
    help="Where workers compute; null: nowhere, tokens are a hash. Else what there is.",
)
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="JSON with keys of docs/configuration.md; the options here win over it.",
)
@click.option(
    "--http", "http_at", default=None, help="Serve HTTP at [HOST:]PORT; port 0: a free one."
)
@click.option("--inject", is_flag=True, default=None, help="Allow `phalanx inject`.")
@click.option("--detach", is_flag=True, help="Return when the node is ready; it runs on.")
@click.option(
    "--timeout",
    type=float,
    callback=check_seconds,
    default=None,
    help="With --detach: seconds to wait at most. Without, as long as the start gets on.",
)
@run_dir_option
@json_option
def up(
    model: str | None,
    ranks: int | None,
    device: str | None,
    config_file: Path | None,
    http_at: str | None,
    inject: bool | None,
    detach: bool,
    timeout: float | None,
    run_dir: Path | None,
    as_json: bool,
) -> None:
    """Start a node: supervisor, gateway, tokenizers, schedulers, workers, KV store, planner.

    \b
    In the foreground it shows what runs until Ctrl-C (a second Ctrl-C stops at once).
    """
    base = parse_config(config_file) if config_file else NodeConfig()
    config = build_config(
        base if http_at is None else with_http(base, http_at),
        find_run_dir(run_dir),
        {"model": model, "ranks": ranks, "device": device, "fault_injection": inject},
    )
    if is_running(config.run_path):
        raise PhalanxError(
            f"a node already runs in {config.run_path}: use another --run-dir, or phalanx down"
        )
    if detach:
        try:
            status = start_detached(config, quiet=as_json, timeout_s=timeout)
        except NoAnswer as error:
            raise NoAnswer(f"{error}. It runs on: phalanx status, phalanx down") from error
        report = {
            "run_dir": config.run_dir,
            "ready_s": status.ready_s,
            "ranks": config.ranks,
            "phases": status.phases,
            "http": http_address(config),
        }
        if as_json:
            print_json(report)
        else:
            at = f", {report['http']}" if report["http"] else ""
            console.print(
                f"ready in {status.ready_s:.1f} s: {config.ranks} ranks in {config.run_dir}{at}"
            )
            if (plan := memory_plan(config)) is not None:
                console.print(plan)
        return
    from phalanx.supervisor.commands.foreground import run_in_foreground

    finish(run_in_foreground(config, as_json))


def http_address(config: NodeConfig) -> str | None:
    """Where a ready node serves HTTP."""
    found = read_address(config.run_path) if config.http.enabled else None
    return url(*found) if found else None


def with_http(base: NodeConfig, at: str) -> NodeConfig:
    """Raises ConfigError unless `at` is [HOST:]PORT."""
    host, _, port = at.rpartition(":")
    if not port.isdecimal():
        raise ConfigError(f"--http {at!r}: expected [HOST:]PORT, for example 8000 or 0.0.0.0:8000")
    http = msgspec.structs.replace(base.http, enabled=True, port=int(port))
    if host:
        http = msgspec.structs.replace(http, host=host.strip("[]"))
    return msgspec.structs.replace(base, http=http)


def build_config(base: NodeConfig, run_dir: Path, given: dict[str, Any]) -> NodeConfig:
    """The configuration of a new node: file, then options; checked, with the model resolved."""
    chosen = {name: value for name, value in given.items() if value is not None}
    config = msgspec.structs.replace(base, **chosen)
    config = msgspec.structs.replace(config, run_dir=str(prepare(run_dir)))
    config.check()
    _ = config.node  # its name must be fit for shared memory
    return msgspec.structs.replace(config, model_dir=str(resolve_model(config.model)))


def resolve_model(name: str) -> Path:
    """The checkpoint directory of a model's name; an embedded model is built if needed.

    In a process of its own: building needs torch, and the command line must not.
    """
    command = [sys.executable, "-P", "-m", "phalanx.worker_svc.model.random_tiny", name]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ConfigError(result.stderr.strip().splitlines()[-1] if result.stderr else name)
    return Path(result.stdout.strip())


def start_detached(
    config: NodeConfig,
    quiet: bool = True,
    owner_fd: int | None = None,
    timeout_s: float | None = None,
) -> StatusReply:
    """Start a supervisor in a session of its own and wait until the node is ready.

    Args:
        owner_fd: The read end of a pipe: when its other end closes the node stops, and its run directory
            goes with it.
        timeout_s: To wait at most. However long a start takes, it is waited for as long as it gets on.

    Raises NoAnswer when the time is up or nothing has got on for START_DEADLINE_MS, and PhalanxError with
    the reason when the supervisor gives up.
    """
    return _start(config, quiet, owner_fd, timeout_s)[0]


def _start(
    config: NodeConfig, quiet: bool, owner_fd: int | None, timeout_s: float | None = None
) -> "tuple[StatusReply, subprocess.Popen[bytes]]":
    """`start_detached`, and the supervisor's process."""
    owner = [] if owner_fd is None else ["--owner-fd", str(owner_fd)]
    forget_failure(config.run_path)
    # Not yet as the node's own: until the supervisor holds the lock, another node may live there.
    wanted = config.save_first(f"config.{os.getpid()}.json")
    with open_output(config.run_path / LOG_DIR / "supervisor.out") as output:
        begins = output.tell()
        child = subprocess.Popen(
            [*_SUPERVISOR, "--run-dir", config.run_dir, "--config", str(wanted), *owner],
            pass_fds=[] if owner_fd is None else [owner_fd],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        return _await_ready(config, child, begins, quiet, timeout_s), child
    finally:
        wanted.unlink(missing_ok=True)


def _await_ready(
    config: NodeConfig,
    child: "subprocess.Popen[bytes]",
    output_begins: int,
    quiet: bool,
    timeout_s: float | None,
) -> StatusReply:
    started = time.monotonic()
    headway, waiting, looked = Headway(started), ["the supervisor"], started
    waits = Waits()
    with errors.status("starting", spinner="dots") if not quiet else _Nothing() as spinner:
        while True:
            if child.poll() is not None:
                raise _failure(config.run_path, child.returncode, output_begins)
            left_s = math.inf if timeout_s is None else started + timeout_s - time.monotonic()
            status = _status(config.run_path, max(_POLL_S, min(_STATUS_S, left_s)))
            now = time.monotonic()
            if status is not None:
                if status.ready_s >= 0:
                    return status
                headway.looked(status.processes, now)
                waiting = waiting_for(status.processes) or ["the group to form"]
            elif now - looked > _OLD_EVERY_S:
                looked, old = now, holders(config.run_path)
                known = child.pid in old or not old
                waiting = ["the supervisor"] if known else [of_earlier_node(old)]
            text = f"waiting for {', '.join(waiting[:6])}"
            spinner.update(f"{now - started:.0f} s, {text}")
            if not quiet and (news := waits.news(text, now)):
                errors.print(news, markup=False, highlight=False, soft_wrap=True)
            late = timeout_s is not None and now - started >= timeout_s
            if late or headway.still_s(now) > START_DEADLINE_MS / 1000:
                break
            time.sleep(_POLL_S)
    why = "" if late else f", and nothing has got on for {headway.still_s(now):.0f} s"
    text = (
        f"the node was not ready after {now - started:.0f} s{why}: waiting for {', '.join(waiting)}"
    )
    if status is None and read_pid(config.run_path) == child.pid:
        text += f"; it does not answer: {why_silent(config.run_path)}"
    raise NoAnswer(text)


@contextlib.contextmanager
def private_node(
    model: str,
    ranks: int,
    quiet: bool = True,
    inject: bool = False,
    base: NodeConfig = NodeConfig(),  # noqa: B008 - it is immutable
) -> Iterator[tuple[NodeConfig, StatusReply]]:
    """A node of one's own in a temporary run directory; everything is gone at the end, also when this
    process is killed."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ph"))
        given = {"model": model, "ranks": ranks, "fault_injection": inject}
        config = build_config(base, Path(folder), given)
        stack.callback(
            sweep, config.node
        )  # one that failed leaves its token log; no other node follows
        read_end, write_end = os.pipe()
        try:
            status, supervisor = _start(config, quiet, read_end)
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        try:
            yield config, status
        finally:
            try:
                killed = stop_node(config.run_path, _PRIVATE_DRAIN_S)
            except NoAnswer:  # a signal has stopped it, or it hangs: nobody else needs it
                supervisor.kill()
                supervisor.wait(_END_S)
                killed = sweep_dead(config.run_path)
            finally:
                os.close(write_end)
                supervisor.wait(_END_S)
            log = TOKENS if supervisor.returncode else ""
            if left := [*killed, *(n for n in names(config.node) if kind_of(n) != log)]:
                raise PhalanxError(f"the node left something behind: {', '.join(left)}")


def stop_node(run_dir: Path, drain_s: float) -> tuple[str, ...]:
    """Tell the node to stop and wait until it has; returns what had to be killed or swept. Raises as `ask`."""
    try:
        done = ask(run_dir, Shutdown(1, drain_s), ShutdownDone, drain_s, STOPPED_MS / 1000)
    except NodeGone:
        return sweep_dead(run_dir)
    except NoNode:
        if not read_pid(run_dir):
            raise
        return sweep_dead(run_dir)  # a supervisor died here, and nobody has started again
    return done.left


class _Nothing:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def update(self, text: str) -> None:
        pass


def _status(run_dir: Path, timeout_s: float) -> StatusReply | None:
    try:
        return ask(run_dir, StatusQuery(1), StatusReply, timeout_s)
    except (NoNode, NoAnswer):
        return None


def _failure(run_dir: Path, returncode: int, output_begins: int) -> PhalanxError:
    """Why the supervisor ended: as it wrote down, or else as it printed last."""
    try:
        reason = json.loads((run_dir / FAILED_FILE).read_text())["reason"]
    except (OSError, ValueError, KeyError):
        output = run_dir / LOG_DIR / "supervisor.out"
        lines = [f"it ended with {returncode}"]
        with contextlib.suppress(OSError):
            lines += output.read_bytes()[output_begins:].decode(errors="replace").split("\n")
        reason = f"{[line for line in lines if line.strip()][-1]}; see {output}"
        if returncode == ExitCode.OK:
            reason = "it was stopped before it was ready (phalanx down, or a signal)"
    error = PhalanxError(f"the node did not start: {reason}")
    code = returncode if returncode in set(ExitCode) else ExitCode.INTERNAL
    if code == ExitCode.OK:  # a good end of the supervisor, but not what was asked for here
        code = ExitCode.UNHEALTHY
    error.exit_code = ExitCode(code)  # type: ignore[attr-defined]
    return error


@click.command()
@click.option(
    "--timeout",
    type=float,
    callback=check_seconds,
    default=DRAIN_MS / 1000,
    help="Seconds to finish requests.",
)
@run_dir_option
@json_option
def down(timeout: float, run_dir: Path | None, as_json: bool) -> None:
    """Stop the node: refuse new requests, finish running ones up to the limit, end every process."""
    path = find_run_dir(run_dir)
    left = list(stop_node(path, timeout))
    deadline = time.monotonic() + 10
    while is_running(path) and time.monotonic() < deadline:
        time.sleep(0.02)
    if as_json:
        print_json({"stopped": not is_running(path), "left": left})
    elif left:
        console.print(f"stopped; had to remove: {', '.join(left)}")
    else:
        console.print("stopped, nothing left behind")
    if is_running(path):
        finish(ExitCode.TIME_LIMIT)
