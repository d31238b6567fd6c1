"Counting what torch runs: operations that move nothing don't count, and what others leave alone stays alone."
import pytest

torch = pytest.importorskip("torch")
from lmcourse.kernels.fusion import Work, count_compiled, count_eager, gelu, kernel_names, rmsnorm_steps, softmax_steps
from lmcourse.tools.checks import check_close

X = torch.ones(4, 8)


@pytest.mark.parametrize("f, operations, size", [
    (lambda x: x.T, 0, 0), (lambda x: x[1:], 0, 0), (lambda x: -x, 1, 2), (lambda x: x + x, 1, 2), (lambda x: x.clone().mul_(2), 2, 4),
    (lambda x: x*x.clone(), 2, 5), (torch.empty_like, 0, 0), (lambda x: torch.add(x, 1, out=x.new_empty(4, 8)), 1, 2),
    (lambda x: x + x[:1].expand(4, 8), 1, 2.25), (gelu, 9, 22)])
def test_operations_and_bytes(f, operations, size): assert count_eager(f, X) == Work(operations, size*X.nbytes)


def test_formulas_are_those_of_torch():
    x, gain = torch.randn(5, 7), torch.randn(7)
    check_close(softmax_steps(x), x.softmax(-1), 1e-5, 1e-7)
    check_close(rmsnorm_steps(x, gain), torch.nn.functional.rms_norm(x, (7,), gain, 1e-5), 1e-5, 1e-6)


def test_kernels_are_counted_once():
    assert kernel_names("") == set() and kernel_names("cpp_fused_a_0 = f()\ncpp_fused_a_0(x); cpp_fused_b_1(y)") == {"cpp_fused_a_0", "cpp_fused_b_1"}
    assert kernel_names("triton_for_fused_add_0") == {"triton_for_fused_add_0"}


@pytest.mark.slow
def test_the_compiler_fuses_a_chain():
    kernels, out = count_compiled(gelu, X)
    assert kernels == 1
    check_close(out, gelu(X), 1e-5, 1e-6)
