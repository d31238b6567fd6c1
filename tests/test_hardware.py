"Hardware: devices that agree with each other, costs that agree with counts, prices that agree with the formulas, bad input refused."
import itertools
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from lmcourse.accounting.flops import adamw_flops, count_operations
from lmcourse.accounting.model_flops import training_flops
from lmcourse.accounting.hardware import DTYPES, Device, Operation, add_cost, adamw_cost
from lmcourse.accounting.hardware import best_seconds, device, devices, embedding_cost
from lmcourse.accounting.hardware import matmul_cost, mbu, measure_device, mfu, rmsnorm_cost
from lmcourse.accounting.hardware import silu_cost, softmax_cost, threads_here, tile_waves
from lmcourse.accounting.run_cost import attention_cost, decoding, price, training_time
from lmcourse.accounting.memory import kv_cache_bytes, training_bytes
from lmcourse.tools import machine
from lmcourse.tools.machine import cores
from lmcourse.tools.config import ModelConfig, TrainConfig
from lmcourse.tools.ledger import find

TOY = Device("toy", {"float32": 100e9, "bfloat16": 400e9}, bytes_per_s=20e9, memory_bytes=4 * 10**9, source="made up")
RATES = [e for e in find("device") if e.key.split(".")[2] in DTYPES]


# Devices

def test_every_device_is_whole():
    asked = "a100-40gb a100-80gb h100 h200 gh200 b200 l4 rtx-4090 m1-max m2"
    assert set(asked.split()) <= set(devices())
    for name, d in devices().items():
        assert d.name == name and d == device(name) and d.source and set(d.peak_flop_per_s) <= set(DTYPES) and "float32" in d.peak_flop_per_s
        assert 1e9 < d.bytes_per_s < 1e14 and 1e9 < d.memory_bytes < 1e12 and all(1e11 < r < 1e17 for r in d.peak_flop_per_s.values())


def test_peaks_are_dense_and_agree_with_each_other():
    "A sparse number among dense ones, or one of another card, breaks a ratio"
    for d in devices().values():
        p = d.peak_flop_per_s
        if "bfloat16" in p: assert p["float32"] <= p["tfloat32"] and p["bfloat16"] / p["tfloat32"] == pytest.approx(2, rel=0.03), d.name
        if "float8" in p: assert p["float8"] / p["bfloat16"] == pytest.approx(2, rel=5e-3), d.name
    assert device("h100").peak_flop_per_s == device("h200").peak_flop_per_s == device("gh200").peak_flop_per_s
    assert device("a100-40gb").peak_flop_per_s == device("a100-80gb").peak_flop_per_s and device("a100") == device("a100-80gb")
    assert device("a100-40gb").bytes_per_s < device("a100-80gb").bytes_per_s < device("h100").bytes_per_s < device("h200").bytes_per_s < device("b200").bytes_per_s


@pytest.mark.parametrize("e", RATES, ids=lambda e: e.key)
def test_what_was_halved_is_said(e):
    assert e.unit == "TFLOP/s" and e.correct is None
    if e.key.endswith("float32") and not e.key.endswith("tfloat32"): return
    assert "sparse" in e.remark and ("half of" in e.remark or "Dense." in e.remark)
    printed = [float(w.replace(",", "")) for w in e.remark.replace("PFLOPS", "").split() if w.replace(",", "").replace(".", "").isdigit()]
    assert any(x == pytest.approx(2 * e.value, rel=2e-3) or 1000 * x == pytest.approx(2 * e.value, rel=2e-3) for x in printed), (e.remark, printed)


def test_entries_name_a_vendor_document():
    for e in find("device"):
        assert e.unit == {"bandwidth": "GB/s", "memory": "GB"}.get(e.key.split(".")[2], "TFLOP/s")
        assert any(w in e.where for w in ("NVIDIA", "Apple")) and any(w in e.where for w in ("data sheet", "white paper", "press release"))


@pytest.mark.parametrize("name, words", [("h10", "did you mean 'h100'"), ("a100-80", "did you mean 'a100-80gb'"), ("abacus", "there are a100, a100-40gb"), ("", "there are")])
def test_unknown_device(name, words):
    with pytest.raises(ValueError, match=words): device(name)


@pytest.mark.parametrize("change, words", [
    (dict(name=""), "name = ''"), (dict(source=" "), "source"), (dict(peak_flop_per_s={}), "no peak rate"), (dict(peak_flop_per_s={"float33": 1.0}), "did you mean 'float32'"),
    (dict(peak_flop_per_s={"float32": 0}), "'float32'.*= 0, expected a number above 0"), (dict(peak_flop_per_s={"float32": math.inf}), "inf"),
    (dict(bytes_per_s=-1.0), "bytes_per_s = -1"), (dict(bytes_per_s=math.nan), "nan"), (dict(bytes_per_s=True), "True"),
    (dict(memory_bytes=0), "memory_bytes = 0"), (dict(memory_bytes=1.5), "a whole number"), (dict(overhead_s=0.0), "overhead_s = 0")])
def test_bad_device(change, words):
    with pytest.raises(ValueError, match=words): replace(TOY, **change)


def test_peak_of_a_type():
    assert TOY.peak("bfloat16") == 400e9 and TOY.ridge("bfloat16") == 20
    with pytest.raises(ValueError, match="toy has no peak rate for float8: there are float32, bfloat16"): TOY.peak("float8")
    with pytest.raises(ValueError, match="did you mean 'float8'"): TOY.peak("float88")


# Measuring

@pytest.fixture
def ticks(monkeypatch):
    "A clock that is five milliseconds later each time it is read"
    monkeypatch.setattr("time.perf_counter", (n*5e-3 for n in itertools.count()).__next__)


def test_best_seconds_takes_turns_and_keeps_the_best(ticks):
    pytest.importorskip("torch")
    order = []
    times = best_seconds({k: partial(order.append, k) for k in "ab"}, 1e-9)
    assert order == list("abab") and times == pytest.approx(dict(a=5e-3, b=5e-3))
    for bad in (0, -1, math.nan, math.inf):
        with pytest.raises(ValueError, match="seconds"): best_seconds({}, bad)


def test_measured_device(ticks):
    "With a clock of which the numbers are known"
    torch = pytest.importorskip("torch")
    before = torch.get_float32_matmul_precision(), torch.get_rng_state().sum().item(), torch.get_num_threads()
    d = measure_device(seconds=0.2, kind="cpu")
    assert d.name == "this" and d.peak_flop_per_s == pytest.approx(dict.fromkeys(("float32", "bfloat16"), 2*256**3/5e-3))
    assert d.bytes_per_s == pytest.approx(12*2**25/5e-3) and d.overhead_s == pytest.approx(5e-3/200) and d.memory_bytes > 0
    assert "measured" in d.source and "float32 by" in d.remark and "256 x 256" in d.remark and "bandwidth by" in d.remark
    assert before == (torch.get_float32_matmul_precision(), torch.get_rng_state().sum().item(), torch.get_num_threads())


def test_this_machine_is_measured_once(monkeypatch):
    from lmcourse.accounting import hardware
    made = []
    monkeypatch.setattr(hardware, "measure_device", lambda: made.append(TOY) or TOY)
    hardware._this.cache_clear()
    assert device("this") is device("THIS") is TOY and made == [TOY]
    hardware._this.cache_clear()


def test_measuring_what_is_not_there(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="finds no GPU"): measure_device(kind="cuda")
    with pytest.raises(ValueError, match="unknown kind of device 'cpus'"): measure_device(kind="cpus")
    with pytest.raises(ValueError, match="seconds = 0"): measure_device(0)


def test_prices_need_no_torch():
    code = ("import sys; from lmcourse.accounting.run_cost import price; from lmcourse.tools.config import ModelConfig, TrainConfig\n"
            "price(ModelConfig.preset('quickstart'), TrainConfig(), 'a100').table(); assert 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_measurement_is_what_the_clock_says(monkeypatch):
    "With known times every rate is known"
    pytest.importorskip("torch")
    from lmcourse.accounting import hardware
    streams = dict(read=(4, 1.), copy=(8, 1.), triad=(12, 1.), update=(12, 1.))
    monkeypatch.setattr(hardware, "_products", lambda kind, longest: {("float32", "torch", 10): None, ("float32", "NumPy", 20): None, ("bfloat16", "torch", 10): None})
    monkeypatch.setattr(hardware, "best_seconds", lambda calls, *rest: {k: 1e-3 if isinstance(k, tuple) else .2 if k == "empty" else .5 for k in calls})
    sizes = {k: n for k, (n, _) in hardware._streams("cpu").items()}
    assert sizes == {k: n*2**25 for k, (n, _) in streams.items()}
    d = measure_device(.1, "cpu")
    assert d.peak_flop_per_s == {"float32": 2*20**3/1e-3, "bfloat16": 2*10**3/1e-3} and "float32 by NumPy" in d.remark
    assert d.bytes_per_s == 12*2**25/.5 and d.overhead_s == pytest.approx(.2/200)


def test_the_best_time_counts(monkeypatch):
    pytest.importorskip("torch")
    slow = iter([0, 5, 1, 7, 3, 9]*10**4)
    clock = dict(now=0.)
    def call(): clock["now"] += next(slow) + 1
    monkeypatch.setattr("time.perf_counter", lambda: clock["now"])
    assert best_seconds(dict(f=call), 30.)["f"] == 1


def test_a_price_knows_recomputation():
    c, t = ModelConfig.preset("quickstart"), TrainConfig(steps=3, batch_size=8)
    plain, again = price(c, t, "a100"), price(c, replace(t, recompute=True), "a100")
    assert again.step_flops == plain.step_flops == sum(training_flops(c, 8).values()) and again.memory_bytes < plain.memory_bytes
    assert again.memory_bytes == sum(training_bytes(c, 8, recompute=True, device="cuda").values()) and again.largest_batch > plain.largest_batch > 8


def test_a_price_knows_how_a_batch_is_cut():
    c = ModelConfig.preset("quickstart")
    whole = price(c, TrainConfig(steps=3, batch_size=32), "a100")
    parts = price(c, TrainConfig(steps=3, tokens_per_step=32*256, batch_size=1, micro_batch=4), "a100")
    assert (parts.tokens, parts.step_flops, parts.flops) == (whole.tokens, whole.step_flops, whole.flops) == (3*32*256, whole.step_flops, 3*whole.step_flops)
    need = lambda n, k: sum(training_bytes(c, n, grad_accum_steps=k, device="cuda").values())
    assert parts.memory_bytes == need(4, 8) < whole.memory_bytes == need(32, 1)


def test_a_batch_that_has_to_be_cut_fits_as_advised():
    "Its gradients are there while the next part goes through the model"
    c, t = ModelConfig.preset("quickstart"), TrainConfig(steps=3, batch_size=64)
    whole = price(c, t, "a100").memory_bytes
    for memory in range(whole//8, whole, whole//8):
        p = price(c, t, replace(device("a100"), memory_bytes=memory))
        need = lambda n: sum(training_bytes(c, n, grad_accum_steps=2, device="cuda").values())
        assert not p.fits and need(p.largest_batch) <= memory < need(p.largest_batch + 1)


def test_a_price_takes_the_fastest_known_number_type_that_can_be_trained_in():
    c, t = ModelConfig.preset("quickstart"), TrainConfig(steps=3, batch_size=2, dtype="auto")
    has = lambda *types: replace(device("a100"), peak_flop_per_s=dict.fromkeys(types, 1e12))
    assert price(c, t, has("float64", "float32")).dtype == "float32"
    with pytest.raises(ValueError, match="a100-80gb has no peak rate for bfloat16, float16 or float32: there are float64"): price(c, t, has("float64"))


def test_a_price_is_that_of_the_device_not_of_the_settings():
    c, t = ModelConfig.preset("ts-36m"), TrainConfig.preset("ts-36m")
    assert {name for name, d in devices().items() if d.kind == "cpu"} == {"m1-max", "m2"}
    p, on_cpu = price(c, t, "h100"), price(c, replace(t, dtype="auto"), replace(device("h100"), kind="cpu"))
    assert p == price(c, replace(t, device="cuda"), "h100") and (round(p.memory_bytes/1e9, 2), p.largest_batch) == (11.54, 953)
    assert on_cpu.dtype == "float32" and (round(on_cpu.memory_bytes/1e9, 2), on_cpu.largest_batch) == (12.18, 868)
    with pytest.raises(ValueError, match="unknown kind of device 'gpu'"): replace(TOY, kind="gpu")


def test_a_price_knows_the_optimizer():
    c, t = ModelConfig.preset("quickstart"), TrainConfig(steps=3, batch_size=2)
    muon = price(c, replace(t, optimizer="muon"), "a100")
    assert muon.memory_bytes == sum(training_bytes(c, 2, optimizer="muon", device="cuda").values()) < price(c, t, "a100").memory_bytes


def test_names_and_whole_numbers_in_other_clothes():
    assert device("A100") == device("a100-80GB") == device(device("a100"))
    assert mfu(np.int64(10**12), np.float64(1), TOY, "float32") == 10 and matmul_cost(np.int64(2), 3, 4) == matmul_cost(2, 3, 4)
    for past in (-1, 1.5):
        with pytest.raises((ValueError, TypeError), match="past"): decoding(1, 1, 64, 4, past=past)


# Utilization

def test_mfu_and_mbu():
    assert mfu(200e9, 1, TOY, "bfloat16") == 0.5 and mfu(50e9, 1, TOY, "float32") == 0.5 and mbu(10e9, 1, TOY) == 0.5
    assert mfu(1e15, 10, "a100") == mfu(1e15, 10, device("a100"), "bfloat16") == 1e15 / 3.12e15
    for bad in (0, -1, math.nan):
        with pytest.raises(ValueError, match="flops"): mfu(bad, 1, TOY, "float32")
        with pytest.raises(ValueError, match="seconds"): mfu(1, bad, TOY, "float32")
        with pytest.raises(ValueError, match="bytes"): mbu(bad, 1, TOY)
        with pytest.raises(ValueError, match="seconds"): mbu(1, bad, TOY)
    with pytest.raises(ValueError, match="no peak rate for bfloat16"): mfu(1, 1, "m2")


# Operations

def test_costs_against_counts():
    "FLOPs operation by operation, bytes by what arrays of NumPy hold, over many sizes"
    softmax = lambda x: (lambda e: e / e.sum(-1, keepdims=True))(np.exp(x - np.array([[r[0]] for r in x])))
    norm = lambda x, g: x * (1 / np.sqrt((x * x).sum(-1, keepdims=True) / x.shape[-1] + 1e-5)) * g
    for m, k, n in ((1, 1, 1), (2, 3, 4), (5, 1, 2), (3, 7, 1)):
        count = lambda f, *shapes: count_operations(f, *shapes).total()
        a, b = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
        assert matmul_cost(m, k, n, "float32") == Operation("matmul", count(np.matmul, (m, k), (k, n)) + m * n, a.nbytes + b.nbytes + (a @ b).nbytes)
        assert add_cost(m * k, "float32") == Operation("add", count(np.add, (m, k), (m, k)), 3 * a.nbytes)
        assert softmax_cost(m, k, "float32") == Operation("softmax", count(softmax, (m, k)), 2 * a.nbytes)
        assert rmsnorm_cost(m, k, "float32") == Operation("rmsnorm", count(norm, (m, k), (k,)), 2 * a.nbytes + 4 * k)
        assert embedding_cost(m, k, "float32") == Operation("embedding", 0, 2 * a.nbytes + np.zeros(m, np.int64).nbytes)
        attend = lambda q, k_, v: softmax(q @ k_.T * 0.5) @ v
        explicit, fused = attention_cost(m, n, k, 1, False, "float32"), attention_cost(m, n, k, 1, True, "float32")
        assert explicit.flops == fused.flops == count(attend, (m, k), (n, k), (n, k)) + m * n + m * k
        assert fused.bytes == 2 * a.nbytes + 2 * b.nbytes and explicit.bytes - fused.bytes == 6 * (a @ b).nbytes
    assert adamw_cost(7) == Operation("adamw", adamw_flops(7), 7 * 7 * 4) and silu_cost(6, "float32") == Operation("silu", 18, 48)


def test_type_scales_bytes_and_heads_scale_all():
    one, many = attention_cost(8, 16, 4), attention_cost(8, 16, 4, heads=6)
    assert (many.flops, many.bytes) == (6 * one.flops, 6 * one.bytes)
    for f, sizes in ((matmul_cost, (2, 3, 4)), (add_cost, (5,)), (silu_cost, (5,)), (softmax_cost, (2, 3)), (rmsnorm_cost, (2, 3))):
        assert 4 * f(*sizes, "bfloat16").bytes == 2 * f(*sizes, "float32").bytes == f(*sizes, "float64").bytes and f(*sizes).flops == f(*sizes, "float32").flops
    with pytest.raises(ValueError, match="did you mean 'bfloat16'"): add_cost(3, "bfloat")


@pytest.mark.parametrize("f, sizes", [(matmul_cost, (2, 3, 4)), (add_cost, (2,)), (silu_cost, (2,)), (rmsnorm_cost, (2, 3)), (softmax_cost, (2, 3)),
                                      (embedding_cost, (2, 3)), (attention_cost, (2, 3, 4, 5)), (adamw_cost, (2,)), (tile_waves, (2, 3)), (decoding, (2, 3, 8, 4, 2))])
def test_sizes_that_make_no_sense(f, sizes):
    assert f(*map(np.int32, sizes)) == f(*sizes) and f(*[np.int32(2**16*n) for n in sizes]) == f(*[2**16*n for n in sizes])    # no overflow
    for i in range(len(sizes)):
        for bad in (0, -3, 2.0, True):
            with pytest.raises(ValueError, match=f"= {bad!r}, expected a whole number above 0"): f(*sizes[:i], bad, *sizes[i + 1:])


def test_time_is_the_larger_limit():
    assert Operation("x", 100 * 10**9, 10**9).seconds(TOY, "float32") == 1 and Operation("x", 10**9, 20 * 10**9).seconds(TOY, "float32") == 1
    at_ridge = Operation("x", 5, 1)
    assert at_ridge.intensity == TOY.ridge("float32") and at_ridge.seconds(TOY, "float32") == 5 / 100e9 == 1 / 20e9


def test_roofline_shows_roof_and_points():
    matplotlib = pytest.importorskip("matplotlib")
    from lmcourse.accounting.hardware import roofline
    ax = roofline(TOY, "float32", {"a": (0.1, 1e9), "b": (50.0, 9e10)})
    roof, *points = [l for l in ax.lines if l.get_marker() == "o" or len(l.get_xdata()) > 2]
    x, y = roof.get_data()
    assert np.allclose(y, np.minimum(100e9, x * 20e9)) and y[0] < y[-1] == 100e9 and x[0] < 0.1 and x[-1] > 50
    assert [tuple(float(v[0]) for v in p.get_data()) for p in points] == [(0.1, 1e9), (50.0, 9e10)]
    assert ax.get_xscale() == ax.get_yscale() == "log" and "FLOPs per byte" in ax.get_xlabel() and "FLOP/s" in ax.get_ylabel()
    assert {t.get_text() for t in ax.texts} == {"a", "b"}
    matplotlib.pyplot.close(ax.figure)


# Tiles

def test_waves_against_a_walk_over_the_tiles():
    rng = np.random.default_rng(0)
    for _ in range(200):
        m, n, tm, tn, p = (int(rng.integers(1, top)) for top in (90, 90, 20, 20, 12))
        tiles = [(i, j) for i in range(0, m, tm) for j in range(0, n, tn)]
        waves = [tiles[i:i + p] for i in range(0, len(tiles), p)]
        useful = sum(min(tm, m - i) * min(tn, n - j) for i, j in tiles) / (len(waves) * p * tm * tn)
        got = tile_waves(m, n, (tm, tn), p)
        assert (got.tiles, got.waves) == (len(tiles), len(waves)) and got.useful == pytest.approx(useful) and 0 < got.useful <= 1


def test_tiles_are_counted_exactly_beyond_what_a_float_can():
    assert tile_waves(2**53 + 1, 1, (1, 1), 1).tiles == tile_waves(2**53 + 1, 1, (1, 1), 1).waves == 2**53 + 1



# Decoding

@pytest.mark.parametrize("b, d, h, g", [(1, 64, 4, 4), (3, 64, 4, 2), (2, 128, 8, 1), (5, 96, 6, 3), (64, 32, 2, 1)])
def test_decoding_is_the_sum_of_its_steps(b, d, h, g):
    kv = d // h * g
    for n, past in ((1, 0), (9, 0), (4, 13)):
        flops = nbytes = 0
        for i in range(past + 1, past + n + 1):
            products = [matmul_cost(b, d, w) for w in (d, d, kv, kv)]
            pair = matmul_cost(1, d // h, i).flops + matmul_cost(1, i, d // h).flops
            config = ModelConfig(d_model=d, num_heads=h, num_kv_heads=g, num_layers=1, context_length=i)
            flops += sum(p.flops for p in products) + b * h * pair
            nbytes += 2 * (2 * d * d + 2 * d * kv + 6 * b * d + 2 * b * kv) + kv_cache_bytes(config, b, dtype="bfloat16")
        assert decoding(n, b, d, h, g, past) == Operation("decoding", flops, nbytes)
    whole, parts = decoding(10, b, d, h, g), [decoding(4, b, d, h, g), decoding(6, b, d, h, g, past=4)]
    assert (whole.flops, whole.bytes) == (sum(p.flops for p in parts), sum(p.bytes for p in parts))
    assert decoding(3, b, d, h) == decoding(3, b, d, h, h) and 2 * decoding(3, b, d, h).bytes == decoding(3, b, d, h, dtype="float32").bytes


def test_fewer_heads_never_lower_the_intensity_and_long_contexts_have_a_floor():
    for b in (1, 16, 256):
        for n in (64, 4096, 2**17):
            mqa, gqa, mha = (decoding(n, b, 4096, 32, g).intensity for g in (1, 8, 32))
            assert mha <= gqa <= mqa
    for g in (1, 8, 32): assert decoding(10**9, 64, 4096, 32, g).intensity == pytest.approx(32 / g, rel=1e-3)


def test_heads_that_do_not_divide():
    for bad in ((1, 1, 64, 5), (1, 1, 64, 4, 3)):
        with pytest.raises(ValueError, match="expected each a multiple of the next"): decoding(*bad)
    with pytest.raises(ValueError, match="past = -1"): decoding(1, 1, 64, 4, past=-1)


# Time and money

def test_training_time():
    assert training_time(100e9, TOY, "float32", mfu=1) == 1 and training_time({"forward": 25e9, "backward": 25e9}, TOY, "float32") == 1
    xl = ModelConfig.preset("cs336-gpt2-xl")
    assert round(training_time(training_flops(xl, 1024), "a100", "float32"), 3) == 1422.048
    for bad in (0, -0.5, 1.01, 50, math.nan):
        with pytest.raises(ValueError, match="mfu = .*expected a share above 0 and at most 1"): training_time(1, TOY, "float32", bad)
    for bad in (0, -1, {}, math.nan):
        with pytest.raises(ValueError, match="flops"): training_time(bad, TOY, "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("preset", ["quickstart", "gpt2-small", "cs336-gpt2-medium"])
def test_price_is_made_of_its_parts(preset, dtype):
    config, train = ModelConfig.preset(preset), TrainConfig(steps=123, batch_size=7, dtype=dtype)
    p = price(config, train, "a100", mfu=0.4, usd_per_hour=3)
    assert p.tokens == 123 * 7 * config.context_length and p.step_flops == sum(training_flops(config, 7).values()) and p.flops == 123 * p.step_flops
    products = dict(float32="tfloat32").get(dtype, dtype)       # As this course trains on a GPU
    assert p.step_seconds == pytest.approx(p.step_flops / (0.4 * device("a100").peak(products))) and p.seconds == pytest.approx(123 * p.step_seconds)
    assert p.memory_bytes == sum(training_bytes(config, 7, dtype=dtype, device="cuda").values()) and p.usd == pytest.approx(3 * p.seconds / 3600)
    exact = replace(device("a100"), memory_bytes=p.memory_bytes)
    assert price(config, train, exact).fits and not price(config, train, replace(exact, memory_bytes=p.memory_bytes - 1)).fits
    text = str(p.table())
    assert price(config, replace(train, dtype="float32"), "m2").dtype == price(config, replace(train, dtype="float32"), "t4").dtype == "float32"
    assert all(w in text for w in ("a100-80gb", products, "40%", "$")) and "cost" not in str(price(config, train, "a100").table())


def test_an_older_card_is_priced_in_float16():
    model, train = ModelConfig.preset("ts-17m"), TrainConfig(batch_size=32, dtype="auto", device="cuda")
    p = price(model, train, "t4")
    assert p.dtype == "float16" and p.fits and p.memory_bytes == sum(training_bytes(model, 32, dtype="float16", device="cuda").values())
    assert p == price(model, replace(train, dtype="float16"), "t4")
    both = lambda bfloat16: price(model, train, replace(TOY, peak_flop_per_s={"float32": 8e12, "bfloat16": bfloat16, "float16": 65e12})).dtype
    assert (both(5e12), both(64e12)) == ("float16", "bfloat16")         # What an older card does in bfloat16 it only imitates


def test_price_refuses():
    config = ModelConfig.preset("quickstart")
    for usd in (0, -1, math.nan):
        with pytest.raises(ValueError, match="usd_per_hour"): price(config, TrainConfig(), "a100", usd_per_hour=usd)
    with pytest.raises(ValueError, match="mfu = 2"): price(config, TrainConfig(), "a100", mfu=2)
    with pytest.raises(ValueError, match="m2 has no peak rate for bfloat16"): price(config, TrainConfig(dtype="bfloat16"), "m2")
    with pytest.raises(ValueError, match="unknown device"): price(config, TrainConfig(), "a1000")
    for micro in (3, 16):                               # Neither can be trained
        with pytest.raises(ValueError, match=f"micro_batch = {micro} does not divide a step of 8 windows"): price(config, TrainConfig(micro_batch=micro), "a100")


@pytest.mark.parametrize("words, threads", [("3", 3), ("2,1", 2), ("", None), ("0", None), ("many", None)])
def test_the_environment_says_how_many_threads(monkeypatch, words, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", words)
    assert threads_here() == (threads or cores())


def test_files_in_a_containers_memory_give_way(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_CONTAINER", tmp_path)
    free = machine.available_bytes()
    if free is None: pytest.skip("needs /proc/meminfo")
    for name, text in dict(max="4000000\n", current="3900000\n", stat="anon 900000\nfile 3000000\nactive_file 100000\ninactive_file 2900000\n").items():
        (tmp_path/f"memory.{name}").write_text(text)
    assert machine.available_bytes() == 3_000_000 and machine.memory_bytes() == 4_000_000
    (tmp_path/"memory.max").write_text("max\n")
    assert machine.available_bytes() > 4_000_000
