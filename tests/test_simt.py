"The simulators of chapter 09: sectors, banks and occupancy agree with counting by hand, threads meet again after a branch."
import os, subprocess, sys

import numpy as np
import pytest
from hypothesis import given, strategies as st

from lmcourse.kernels import threads
from lmcourse.kernels.simt import WarpTraffic, bank_rounds, chips, load, occupancy, predicted_share, run_threads, sectors, store, widest_load

words = st.lists(st.integers(0, 500), min_size=1, max_size=32)


@given(words, st.sampled_from((1, 2, 4, 8)))
def test_sectors_are_those_that_hold_a_byte_that_is_asked_for(at, size):
    assert sectors((size*a for a in at), size) == len({b//32 for a in at for b in range(size*a, size*(a + 1))})


@given(words)
def test_a_bank_gives_one_word_a_round(at):
    rounds = bank_rounds(at)
    assert rounds == max(len({w for w in at if w % 32 == b}) for b in range(32)) == bank_rounds(at*2) == bank_rounds(at[::-1])


@given(st.integers(1, 1024), st.integers(1, 255), st.integers(0, 160_000), st.sampled_from(("a100", "h100")))
def test_what_is_on_a_multiprocessor_fits(threads, registers, shared, chip):
    c = chips()[chip]
    try: o = occupancy(threads, registers, shared, chip)
    except ValueError as e: assert "no block fits" in str(e) and -(-threads//128)*128*(registers + 7) > c.registers; return
    warps = -(-threads//32)
    assert 0 < o.share <= 1 and o.blocks*warps <= c.warps and o.blocks*warps*32*registers <= c.registers and o.blocks*(shared + 1024) <= c.shared_bytes


def test_an_unknown_chip_is_named():
    with pytest.raises(ValueError, match="unknown chip 'v100'"): occupancy(128, 32, chip="v100")


def test_a_wider_load_never_hurts():
    assert [widest_load(n) for n in (1, 2, 3, 4, 6, 8, 24)] == [2, 4, 2, 8, 4, 16, 16]
    assert predicted_share(4096) > predicted_share(4096 - 4) > predicted_share(4096 - 2) > predicted_share(4096 - 1)


def test_threads_meet_again_after_a_branch():
    def kernel(t):
        if t % 2: yield load("x", t)
        yield store("x", t, t)
    x = np.zeros(32)
    assert run_threads(kernel, 32, dict(x=x)) == WarpTraffic(2, 8 + 8, 1) and (x == np.arange(32)).all()


def test_a_bad_address_is_named_before_it_is_used():
    def kernel(t): yield load("x", t - 1)
    with pytest.raises(IndexError, match=r"thread 0: x\[-1\], expected 0 to 4"): run_threads(kernel, 5, dict(x=np.zeros(5)))


@pytest.mark.parametrize("n", [0, 1, 15, 16, 33])
def test_sums_of_any_length(n):
    total = np.zeros(1)
    threads.sum_kernel[max(1, -(-n//threads.THREADS)), threads.THREADS](np.arange(1., n + 1), total)
    assert total[0] == n*(n + 1)/2


def test_kernels_run_where_numba_has_a_gpu_but_no_toolkit_and_after_another_import_of_numba_s_cuda():
    "torch's wheels bring no toolkit: with a GPU each kernel of the page failed; after another import of numba.cuda the simulator was not used."
    code = ("from numba import cuda\nimport numpy as np\nfrom lmcourse.kernels.threads import add_kernel\n"
            "add_kernel[3, 4](np.ones(10), np.ones(10), out := np.zeros(10))\nassert (out == 2).all()")
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_threads_of_a_warp_may_ask_for_numbers_of_different_sizes():
    "All were counted with the size of the first: 16 numbers of 8 bytes are 4 sectors, and 16 of one byte are part of one."
    def kernel(t): yield load("wide" if t < 16 else "small", t)
    arrays = dict(wide=np.zeros(32), small=np.zeros(32, np.int8))
    assert run_threads(kernel, 32, arrays) == WarpTraffic(1, 5, 0)
    assert run_threads(lambda t: kernel(31 - t), 32, arrays) == WarpTraffic(1, 5, 0)
