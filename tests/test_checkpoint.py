"Checkpoints: what comes back, what is refused, and what a kill leaves behind"
import json
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file
from torch import nn

from lmcourse.training.checkpoint import latest_checkpoint, load_checkpoint, read_config, save_checkpoint, unique_tensors
from lmcourse.training.optim_torch import AdamW, parameter_groups


class Model(nn.Module):
    def __init__(self, width=4, tied=True):
        super().__init__()
        self.token_embeddings, self.lm_head = nn.Embedding(10, width), nn.Linear(width, 10, bias=False)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("scale", torch.tensor(float(width)))
        self.unused = nn.Parameter(torch.zeros(2))
        if tied:
            self.lm_head.weight = self.token_embeddings.weight

    def forward(self, ids):
        return self.lm_head(self.norm(self.token_embeddings(ids))) * self.scale


def made(steps=3, make=AdamW, **kw):
    with torch.random.fork_rng():
        torch.manual_seed(steps)
        model = Model(**kw)
    optimizer = make(parameter_groups(model, 0.1))
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.tensor([step, 3])).square().mean().backward()
        optimizer.step()
    return model, optimizer


def values(model, optimizer):
    tensors = dict(model.state_dict())
    names = {id(p): n for n, p in model.named_parameters()}
    return tensors | {f"{k}.{names[id(p)]}": torch.as_tensor(v) for p, s in optimizer.state.items() for k, v in s.items()}


def equal(a, b):
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("make", [AdamW, torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1)],
                         ids=["ours", "torch", "momentum", "sgd"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("steps", [0, 3])
def test_round_trip(tmp_path, make, tied, steps):
    one, other = made(steps, make, tied=tied), made(1, make, tied=tied)
    one[1].param_groups[0]["lr"] = 0.1 + 0.2
    path = save_checkpoint(tmp_path, 12, *one, dict(a=dict(b=1)), dict(tokens=5, losses=[0.1, float("inf")]))
    assert path == tmp_path / "step_000012" == latest_checkpoint(tmp_path)
    assert load_checkpoint(path, *other) == dict(tokens=5, losses=[0.1, float("inf")], step=12) and read_config(path) == dict(a=dict(b=1))
    assert equal(values(*one), values(*other))
    for a, b in zip(one[1].param_groups, other[1].param_groups):
        assert {k: v for k, v in a.items() if k != "params"} == {k: v for k, v in b.items() if k != "params"}
    names = {"token_embeddings.weight", "norm.weight", "norm.bias", "scale", "unused"} | (set() if tied else {"lm_head.weight"})
    assert load_file(path / "model.safetensors").keys() == names


def test_names_of_a_compiled_model_are_plain(tmp_path):
    model, optimizer = made()
    compiled = torch.compile(model)
    assert list(unique_tensors(compiled)) == list(unique_tensors(model))
    path = save_checkpoint(tmp_path, 1, compiled, optimizer, {})
    other = made(0)
    load_checkpoint(path, torch.compile(other[0]), other[1])
    assert equal(values(model, optimizer), values(*other))


def test_weights_alone_leave_random_states(tmp_path):
    one, other = made(), made(0)
    path = save_checkpoint(tmp_path, 1, *one, {})
    before = torch.get_rng_state()
    torch.rand(1)
    after = torch.get_rng_state()
    load_checkpoint(path, other[0])
    assert torch.equal(torch.get_rng_state(), after) and not other[1].state
    load_checkpoint(path, *other)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_refused_changes_nothing(tmp_path):
    path = save_checkpoint(tmp_path, 1, *made(), dict(model=dict(d_model=4)))
    other = made(1)
    before = {k: v.clone() for k, v in values(*other).items()}
    bad = path.with_name("bad")
    for name in ("model.safetensors", "optimizer.safetensors", "config.json", "state.json"):
        for change in (lambda b: b[:-2], lambda b: b[:10], lambda b: b"", lambda b: None):
            subprocess.run(["cp", "-r", path, bad], check=True)
            (bad / name).unlink()
            if (content := change((path / name).read_bytes())) is not None:
                (bad / name).write_bytes(content)
            with pytest.raises((ValueError, FileNotFoundError), match=name) as e:
                load_checkpoint(bad, *other, config=dict(model=dict(d_model=4)))
            assert "\n" not in str(e.value)
            subprocess.run(["rm", "-r", bad], check=True)
    for fits, words in ((Model(width=8), r"float32 \[10, 4\] there, float32 \[10, 8\]"), (Model(tied=False), "lm_head.weight is in the model, but not there")):
        with pytest.raises(ValueError, match=words):
            load_checkpoint(path, fits)
    with pytest.raises(ValueError, match="model.d_model is 4 there, 8 here"):
        load_checkpoint(path, *other, config=dict(model=dict(d_model=8)))
    with pytest.raises(ValueError, match="model.layers is None there, 2 here"):
        load_checkpoint(path, *other, config=dict(model=dict(layers=2)))
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_checkpoint(tmp_path / "nothing", *other)
    assert equal(values(*other), before)


def test_a_refused_optimizer_leaves_the_model(tmp_path):
    path = save_checkpoint(tmp_path, 1, *made(), {})
    (path / "optimizer.safetensors").write_bytes(b"x")
    model, optimizer = made(1)
    before = {k: v.clone() for k, v in values(model, optimizer).items()}
    with pytest.raises(ValueError, match="optimizer.safetensors: 1 bytes"):
        load_checkpoint(path, model, optimizer)
    assert equal(before, values(model, optimizer))


def test_a_foreign_folder(tmp_path):
    save_file(dict(a=torch.zeros(1)), tmp_path / "model.safetensors")
    (tmp_path / "state.json").write_text(json.dumps(dict(step=1)))
    with pytest.raises(ValueError, match="not written by save_checkpoint"):
        load_checkpoint(tmp_path, Model())


def test_no_pickle(tmp_path, monkeypatch):
    import pickle
    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    load_checkpoint(save_checkpoint(tmp_path, 1, *made(), {}), *made(0))


def test_keep_and_order(tmp_path):
    one = made()
    for step in (9, 10, 999_999, 1_000_000):
        save_checkpoint(tmp_path, step, *one, {}, keep=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000010", "step_1000000", "step_999999"]
    assert latest_checkpoint(tmp_path).name == "step_1000000"
    assert save_checkpoint(tmp_path, 5, *one, {}, keep=1).is_dir()                  # What was just asked for is never the one to go
    (tmp_path / "step_2000000").write_text("a file")
    (tmp_path / "step_3000000.tmp").mkdir()
    (tmp_path / "step_x").mkdir()
    assert latest_checkpoint(tmp_path).name == "step_1000000"
    assert latest_checkpoint(tmp_path / "nothing") is None


def test_a_second_save_of_a_step_replaces_the_first(tmp_path):
    one = made()
    save_checkpoint(tmp_path, 5, *one, {}, dict(which=1))
    path = save_checkpoint(tmp_path, 5, *one, {}, dict(which=2))
    assert load_checkpoint(path, *made(0))["which"] == 2 and [p.name for p in tmp_path.iterdir()] == ["step_000005"]


KILLED = """
import os, shutil, sys
sys.path[:0] = {path!r}
import torch
from pathlib import Path
torch.set_num_threads(1)
from lmcourse.training import checkpoint as c
from lmcourse.training.optim_torch import AdamW
def made(value):
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, value)
    optimizer = AdamW(model.parameters(), lr=0.)
    for p in model.parameters(): p.grad = torch.ones_like(p)
    optimizer.step()
    return model, optimizer
def deadly(n): # The n-th call that touches the disk ends the process: a file is cut in the middle
    count = iter(range(10_000))
    def wrap(owner, name):
        f = getattr(owner, name)
        def call(*args, **kw):
            if next(count) == n:
                if name in ("save_file", "write_text"):
                    f(*args, **kw)
                    path = args[1] if name == "save_file" else args[0]
                    os.truncate(path, os.path.getsize(path)//2)
                os._exit(9)
            return f(*args, **kw)
        setattr(owner, name, call)
    for owner,name in ((os, "rename"), (os, "fsync"), (os, "unlink"), (os, "rmdir"), (Path, "mkdir"), (Path, "write_text"), (c, "save_file")):
        wrap(owner, name)
first, second, keep = map(int, sys.argv[2:])
old, new, other = made(1.), made(2.), made(0.)
for n in range(1000):
    run = Path(sys.argv[1])/str(n)
    c.save_checkpoint(run, first, *old, dict(d=3), dict(which=1))
    pid = os.fork()
    if not pid:
        deadly(n)
        c.save_checkpoint(run, second, *new, dict(d=3), dict(which=2), keep=keep)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    found = c.load_checkpoint(c.latest_checkpoint(run), *other)
    assert found["step"] == (first, second)[found["which"] - 1], (n, found)
    assert (other[0].weight == found["which"]).all(), (n, found)
    if not status: break
    assert status == 9, status
    c.save_checkpoint(run, second + 1, *new, dict(d=3), dict(which=2), keep=1)
    assert [p.name for p in run.iterdir()] == [f"step_{{second + 1:06d}}"], n
assert found["which"] == 2
print(n)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("first, second, keep", [(1, 2, 1), (1, 2, 2), (2, 2, 1)])
def test_killed_at_every_call(tmp_path, first, second, keep):
    done = subprocess.run([sys.executable, "-c", KILLED.format(path=sys.path), tmp_path, str(first), str(second), str(keep)],
                          capture_output=True, text=True, timeout=300, env=os.environ | dict(OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 10


def test_everything_is_synced_before_it_gets_its_name(tmp_path, monkeypatch):
    from lmcourse.training import checkpoint
    events, rename, sync = [], os.rename, checkpoint.sync
    monkeypatch.setattr(checkpoint, "sync", lambda p: (events.append(("sync", p.name)), sync(p)))
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append(("rename", b.name)), rename(a, b)))
    path = save_checkpoint(tmp_path / "run", 1, *made(), {})
    at = events.index(("rename", path.name))
    assert {name for _, name in events[:at]} == {f.name for f in path.iterdir()} | {"step_000001.tmp"}
    assert events[at - 1:] == [("sync", "step_000001.tmp"), ("rename", path.name), ("sync", "run")]


def test_an_optimizer_of_another_model(tmp_path):
    with pytest.raises(ValueError, match="a parameter that is not the model's"):
        save_checkpoint(tmp_path, 1, made()[0], made()[1], {})
    assert not any(tmp_path.iterdir())
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path, 1, *made(), dict(bad=object()))
    assert not any(tmp_path.iterdir())
