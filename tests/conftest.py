"The same random cases in every run of `make test`, however long they take; new ones with HYPOTHESIS_PROFILE=random, as in `make test-all`."
import gc
import inspect
import os
import signal
import sys
from functools import cache
from types import SimpleNamespace

# Half a million objects live as long as the tests: to search them for garbage at Python's pace takes a tenth of the time.
gc.set_threshold(20_000, 20, 20)

# jsonschema's test of addresses, which nothing here asks for: it builds a parser for each rule of a grammar, for 5 seconds in every process.
sys.modules.setdefault("rfc3987_syntax", None)

# One thread a process, as for the processes that tests start: a run is the same to the bit only with as many threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where a test asks for more, threads that wait leave the cores to other tests instead of spinning.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A processor without AVX-512 has none for oneDNN either. Where torch alone is told so, its attention in bfloat16 packs for instructions that
# it then may not use, and fails ("pack_vnni2 is only supported when avx512 is supported", torch 2.13 on a processor with AMX).
if os.environ.get("ATEN_CPU_CAPABILITY") in ("avx2", "default"): os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

# pytest-xdist's processes ignore Ctrl-C, and so would every command that a test starts and stops by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)

try: from hypothesis import HealthCheck, settings
except ImportError: pass                                        # Tests that need it say so themselves
else:
    no_clock = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow]) # A busy machine is no mistake
    settings.register_profile("same", derandomize=True, **no_clock)
    settings.register_profile("random", **no_clock)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

LONG = ("test_grade", "test_trainer", "test_cli", "test_doctor", "test_mesh", "test_graph_model", "test_sweep", "test_decode", "test_fast_bpe", "test_help", "test_case",
        "test_sharding", "test_alignment_runs", "test_parallel_np", "test_kernel", "test_kv_cache", "test_engine", "test_whole_pipeline", "test_distillation", "test_kernel_names")


def pytest_collection_modifyitems(items):
    "Files that take longest come first, so that no process is left alone with one at the end; what needs a GPU is skipped without one."
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
    if not (marked := [i for i in items if i.get_closest_marker("cuda")]): return
    import pytest
    import torch
    if torch.cuda.is_available(): return
    for item in marked: item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_collection_finish():
    "A process that has loaded all tests doesn't do again and again what takes as long as the tests themselves."
    if trainer := sys.modules.get("lmcourse.training.trainer"): # Each run looks for garbage first, in a million objects that aren't its own
        trainer.gc = SimpleNamespace(collect=lambda: 0, freeze=gc.freeze, unfreeze=gc.unfreeze)
    # Each call of a kernel lists all functions of triton's language; each command parses a module for every class that has options
    for name, asks in (("triton.runtime.interpreter", "getmembers"), ("tyro._docstrings", "getsource")):
        if module := sys.modules.get(name): module.inspect = SimpleNamespace(**vars(inspect) | {asks: cache(getattr(inspect, asks))})


def pytest_terminal_summary(terminalreporter):
    "With `pytest -s`: how many wrong answers each grader refuses, and how many right ones it accepts."
    from graders import score_lines
    if terminalreporter.config.option.capture != "no": return
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, []) if getattr(r, "when", "") == "call"]
    if lines := list(score_lines(reports)): terminalreporter.section("graders")
    for line in lines: terminalreporter.line(line)
