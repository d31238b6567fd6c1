"""`from lmcourse import ...` offers what most people want, and imports nothing before it is asked for."""
import subprocess, sys

import pytest

import lmcourse


def test_each_name_is_there_and_is_documented():
    assert len(lmcourse.__all__) == 30 and set(lmcourse.__all__) <= set(dir(lmcourse))
    for name in lmcourse.__all__:
        found = getattr(lmcourse, name)
        assert found.__name__ == name and found.__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'Transfomer'"): lmcourse.Transfomer


def test_the_package_alone_imports_no_torch():
    code = "import sys, lmcourse; assert not {'torch', 'numpy', 'numba'} & set(sys.modules); from lmcourse import ModelConfig; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
