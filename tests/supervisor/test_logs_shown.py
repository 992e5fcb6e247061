"""`phalanx logs`: where no log is, what there is instead."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from phalanx.protocol.rundir import LOG_DIR
from phalanx.supervisor.ask import NoNode
from phalanx.supervisor.commands.look import logs


@pytest.mark.parametrize("process", [[], ["worker-0"]])
def test_where_no_node_ever_was_none_is_named(tmp_path: Path, process: list[str]) -> None:
    result = CliRunner().invoke(logs, [*process, "--run-dir", str(tmp_path)])
    assert isinstance(result.exception, NoNode) and str(tmp_path) in str(result.exception)


def test_a_process_without_a_log_is_refused_with_those_that_have_one(tmp_path: Path) -> None:
    (tmp_path / LOG_DIR).mkdir()
    (tmp_path / LOG_DIR / "gateway.log").touch()
    result = CliRunner().invoke(logs, ["gatewya", "--run-dir", str(tmp_path)])
    assert result.exit_code == 2 and "no log of 'gatewya'" in result.output
    assert result.output.rstrip().endswith("there are: gateway")
