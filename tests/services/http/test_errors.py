"""Whatever the gateway refuses or ends with has a status."""

import pytest

from phalanx.protocol.errors import Code
from phalanx.services.http.errors import of_code


@pytest.mark.parametrize("code", Code)
def test_every_code_has_a_status(code: Code) -> None:
    error = of_code(code, "why")
    assert 400 <= error.status < 600 and (error.code, error.text) == (code.value, "why")
