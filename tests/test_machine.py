"How a measured speed is reported."
import pytest

from lmcourse.tools.machine import report_speed


@pytest.mark.parametrize("pair", [(1.5, 2), [1.5, 2]])
def test_a_ratio_is_compared_with_what_was_expected(pair, capsys):
    report_speed({"faster": pair})
    assert "did not hold here: faster: 1.50 times, expected at least 2" in capsys.readouterr().out
