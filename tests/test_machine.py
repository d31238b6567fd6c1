"How a measured speed is reported."
import pytest

from lmcourse.tools import machine
from lmcourse.tools.machine import report_speed


@pytest.mark.parametrize("pair", [(1.5, 2), [1.5, 2]])
def test_a_ratio_is_compared_with_what_was_expected(pair, capsys):
    report_speed({"faster": pair})
    assert "did not hold here: faster: 1.50 times, expected at least 2" in capsys.readouterr().out


@pytest.mark.parametrize("lines, name", [
    (["cpu family\t: 25", "model\t\t: 17", "model name\t: AMD EPYC", "stepping\t: 1"], "AMD EPYC (family 25 model 17)"),
    (["cpu family\t: 26", "model\t\t: 2", "model name\t: AMD EPYC"], "AMD EPYC (family 26 model 2)"),
    (["cpu family\t: 6", "model\t\t: 142", "model name\t: Intel(R) Core(TM) i5-8250U CPU @ 1.60GHz"], "Intel(R) Core(TM) i5-8250U CPU @ 1.60GHz"),
    (["model name\t: Some make"], "Some make"), (["Hardware\t: BCM2711"], "from Python")])
def test_two_processors_of_a_make_have_two_names(lines, name, monkeypatch):
    "A virtual machine may tell the make only; what they measure must not end up in one column"
    monkeypatch.setattr(machine.Path, "read_text", lambda self, **how: "\n".join(["processor\t: 0", *lines, "", "processor\t: 1", *lines]))
    monkeypatch.setattr(machine.platform, "processor", lambda: "from Python")
    assert machine.processor_name() == name
