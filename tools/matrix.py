"""Run the checks in many surroundings, one after another, to show that they depend on none of them. Usage: tools/matrix.py [name ...]

Each row takes a fresh clone of the last commit and runs the notebooks and the tests there, with this Python and its packages.
A row is a name, what is added to the environment, what the command starts with, and which notebooks and files of tests are left out.
Takes hours; `make matrix` runs all of it.
"""
import argparse, contextlib, json, os, shutil, subprocess, sys, tempfile, time
from pathlib import Path

ROOT, BIN = Path(__file__).resolve().parent.parent, Path(sys.executable).parent
BUSY = [sys.executable, "-c", "while True: pass"]
ONE_CORE = ["taskset", "-c", "0"] if shutil.which("taskset") else None
# Their kernels are made of machine instructions that plain Python does not have, or would take hours there.
COMPILED = """00m_compiled 01d_fast_bpe 01e_tokenizer 01f_explorer 01g_token_files 03h_fast_np 03ia_transpose 03l_fused_attention 04a_data 04k_trainer 06a_sweep 06c_case 06d_doctor 07aa_fast_decoder 07ab_paged_cache
07b_engine 07c_speculative 07d_quantization 07e_draft_engine 07z_inference 11d_mup 12a_perplexity 13g_minhash 90a_bench 90b_bench_generation 90f_serve
90d_throughput 90g_cli test_bench_command test_case test_checkpoint test_cli test_compiled test_data test_doctor test_engine
test_exercises_inference test_explorer test_fast_bpe test_generate test_interactive test_kernel test_kv_cache test_paged_cache test_parts test_quantization
test_serve test_speculative test_sweep test_tokenizer test_trainer""".split()
ROWS = {
    "as it is": ({}, []),
    "one core": ({}, ONE_CORE),
    "four threads": ({"OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "4"}, []),
    "torch with AVX2": ({"ATEN_CPU_CAPABILITY": "avx2"}, []),
    "torch without vectors": ({"ATEN_CPU_CAPABILITY": "default"}, []),
    "NumPy's products for Haswell": ({"OPENBLAS_CORETYPE": "Haswell"}, []),
    "four busy processes": ({}, []),
    "another place and seed": ({"LC_ALL": "C", "LANG": "C", "TZ": "Asia/Kathmandu", "PYTHONHASHSEED": "7"}, []),
    "no home": ({"HOME": "/proc/nothing", "XDG_CACHE_HOME": "/proc/nothing/cache", "MPLCONFIGDIR": "/proc/nothing/mpl"}, []),
    "nothing compiled": ({"NUMBA_DISABLE_JIT": "1"}, [], COMPILED),
}


@contextlib.contextmanager
def company(name):
    "Four processes that keep the processor busy, where the row asks for them."
    busy = [subprocess.Popen(BUSY) for _ in range(4)] if name == "four busy processes" else []
    try: yield
    finally:
        for process in busy: process.kill()


def run(name, env, before, without=()):
    "One row: how long it took, and whether all passed."
    with tempfile.TemporaryDirectory(prefix="lmcourse-") as tmp, company(name):
        clone = Path(tmp).resolve()/"clone"
        subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
        start = time.time()
        env = {"TORCHINDUCTOR_CACHE_DIR": f"{tmp}/inductor"} | env  # Code that torch compiled for other instructions would be loaded, and crash
        command = [*before, sys.executable, "tools/check.py", "--only", "notebooks", "tests", *(["--without", *without] if without else [])]
        done = subprocess.run(command, cwd=clone, env=os.environ | {"PYTHONPATH": str(clone)} | env, capture_output=True, text=True)
        if done.returncode: print("\n".join([*done.stdout.splitlines()[-80:], *done.stderr.splitlines()[-10:]]), flush=True)
        return dict(name=name, passed=not done.returncode, minutes=round((time.time() - start)/60, 1))


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*", help=f"rows to run, all if none: {', '.join(ROWS)}")
    names, bad = p.parse_args().names or list(ROWS), []
    if odd := set(names) - set(ROWS): sys.exit(f"no row called {', '.join(sorted(odd))}: there are {', '.join(ROWS)}")
    for name in names:
        env, before, *without = ROWS[name]
        if before is None: print(f"{name}: skipped, the system has no taskset"); continue
        row = run(name, env, before, *without)
        print(json.dumps(row), flush=True)
        bad += [name]*(not row["passed"])
    sys.exit(f"failed: {', '.join(bad)}" if bad else 0)
