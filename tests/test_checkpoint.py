"Checkpoints: what comes back, what is refused, and what a kill leaves behind"
import errno
import io
import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from processes import script

torch = pytest.importorskip("torch")
import safetensors.torch
from safetensors.torch import load_file, save_file
from torch import nn

from lmcourse.architecture.transformer_np import init_params, learning_rate_scales, loss_and_grads
from lmcourse.architecture.transformer_torch import TransformerLM
from lmcourse.tools import files
from lmcourse.tools.config import ModelConfig
from lmcourse.training import checkpoint
from lmcourse.training.checkpoint import (Checkpoints, load_checkpoint, named_state, read_config, read_state, safetensors_chunks, save_checkpoint,
                                          unique_tensors, write_safetensors)
from lmcourse.training.optim_np import AdamWNp
from lmcourse.training.optim_torch import AdamW, Muon, Plateau, muon_groups, parameter_groups


@pytest.fixture
def tmp_path(tmp_path): # In memory where that is possible: thousands of files are synced here
    if not os.access("/dev/shm", os.W_OK): yield tmp_path; return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder: yield Path(folder)


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


def saved(tmp_path, *what, **more):
    save_checkpoint(*(what or made()), 1, tmp_path / "saved", **more)
    return tmp_path / "saved"


@pytest.mark.parametrize("make", [AdamW, torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1)],
                         ids=["ours", "torch", "momentum", "sgd"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("out", ["folder", "a/b/new.pt", "a/file.safetensors", io.BytesIO, "raw"])
def test_round_trip(tmp_path, make, tied, steps, out):
    one, other = made(steps, make, tied=tied), made(1, make, tied=tied)
    one[1].param_groups[0]["lr"] = 0.1 + 0.2
    config, state = dict(a=dict(b=1)), dict(tokens=5, losses=[0.1, float("inf")], plateau=dict(best=1e-300, bad=None))
    out = tmp_path / out if out != "raw" and isinstance(out, str) else open(tmp_path / "raw", "wb+", buffering=0) if out == "raw" else out()
    assert save_checkpoint(*one, 12, out, config, state) is None
    back = (lambda: (out.seek(0), out)[1]) if hasattr(out, "seek") else lambda: out
    assert load_checkpoint(back(), *other) == 12 and read_config(back()) == config and read_state(back()) == state
    assert equal(values(*one), values(*other))
    for a, b in zip(one[1].param_groups, other[1].param_groups):
        assert {k: v for k, v in a.items() if k != "params"} == {k: v for k, v in b.items() if k != "params"}
    names = {"token_embeddings.weight", "norm.weight", "norm.bias", "scale", "unused"} | (set() if tied else {"lm_head.weight"})
    found = safetensors.torch.load(back().read()) if hasattr(out, "seek") else load_file(out if out.is_file() else out / "model.safetensors")
    assert {n for n in found if not n.startswith("optimizer/")} == names
    if not hasattr(out, "seek"): assert [p.name for p in out.parent.iterdir()] == [out.name]


def test_two_kinds_of_groups_and_plateau_state_go_on_bit_for_bit(tmp_path):
    config = ModelConfig(vocab_size=20, context_length=8, d_model=8, num_layers=1, num_heads=2)

    def new(seed):
        model = TransformerLM(config, seed=seed)
        return model, Muon(muon_groups(model, 0.1), lr=0.1), Plateau(2, 0.5)

    def go_on(model, optimizer, plateau, first, last):
        for step in range(first, last):
            ids = torch.from_numpy(np.random.default_rng(step).integers(20, size=(2, 9)))
            loss = model.loss(ids[:, :-1], ids[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            for group in optimizer.param_groups: group["lr"] = 0.1 * plateau.see(float(loss.detach()))
            optimizer.step()
        return values(model, optimizer) | {f"plateau.{k}": torch.tensor(v, dtype=torch.float64) for k, v in plateau.state().items()}

    expected, half, other = go_on(*new(0), 0, 12), new(0), new(1)
    go_on(*half, 0, 6)
    save_checkpoint(*half[:2], 6, tmp_path / "a", state=dict(plateau=half[2].state()))
    assert load_checkpoint(tmp_path / "a", *other[:2]) == 6
    other[2].load(read_state(tmp_path / "a")["plateau"])
    assert equal(go_on(*other, 6, 12), expected) and half[2].state() != Plateau(2, 0.5).state()


def test_every_field_of_the_state_file(tmp_path):
    path = saved(tmp_path, state=dict(a=1), config=dict(b=2))
    record = json.loads((path / "state.json").read_text())
    assert record["step"] == 1 and record["version"] == checkpoint.__version__ and record["libraries"] == dict(numpy=np.__version__, torch=torch.__version__)
    assert {p.name for p in path.iterdir()} == {"state.json", *record["files"]}
    assert not {p.stat().st_mode & 0o777 for p in path.iterdir()} - {0o666 & ~(os.umask(mask := os.umask(0)) or mask)}


def test_files_and_the_umask(tmp_path):
    for mask in (0o022, 0o027, 0o002, 0o077):
        before = os.umask(mask)
        try: save_checkpoint(*made(), 1, tmp_path / f"{mask}")
        finally: os.umask(before)
        assert {p.stat().st_mode & 0o777 for p in (tmp_path / f"{mask}").iterdir()} == {0o666 & ~mask}


class Slow(io.BytesIO): # Takes a few bytes at a time, as an unbuffered file may
    def write(self, data): return super().write(bytes(data)[:7])


def test_a_file_object_that_takes_a_few_bytes_at_a_time():
    save_checkpoint(*made(), 1, slow := Slow())
    save_checkpoint(*made(), 1, whole := io.BytesIO())
    assert slow.getvalue() == whole.getvalue()


# The format

TYPES = [t for t in vars(torch).values() if isinstance(t, torch.dtype) and str(t)[6:] in checkpoint._KINDS]


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.text(max_size=5).filter(lambda n: n != "__metadata__"), st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 3), max_size=3)), max_size=4),
       st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2))
def test_files_are_those_of_the_library(tensors, metadata):
    tensors = {n: (torch.arange(max(1, int(np.prod(s)))*t.itemsize) % 2).to(torch.uint8).view(t)[:int(np.prod(s))].reshape(s) for n, (t, s) in tensors.items()}
    header, *rest = safetensors_chunks(tensors, metadata)
    ours, theirs = header + b"".join(f().tobytes() for f in rest), safetensors.torch.save(tensors, metadata or None)
    for file, read in ((ours, safetensors.torch.load(ours)), (theirs, {n: t.tensor() for n, t in checkpoint._parse(np.frombuffer(theirs, np.uint8), "x")[0].items()})):
        assert read.keys() == tensors.keys()
        for n, t in tensors.items():
            assert read[n].dtype == t.dtype and read[n].shape == t.shape and read[n].reshape(-1).view(torch.uint8).tolist() == t.reshape(-1).view(torch.uint8).tolist()
    assert checkpoint._parse(np.frombuffer(ours, np.uint8), "x")[1] == metadata


@settings(deadline=None, max_examples=100)
@given(st.one_of(st.binary(max_size=60), st.recursive(st.none() | st.integers() | st.text(max_size=3), lambda s: st.lists(s) | st.dictionaries(
    st.sampled_from(["__metadata__", "a", "dtype", "shape", "data_offsets"]), s)).map(
    lambda v: len(t := json.dumps(v).encode()).to_bytes(8, "little") + t)))
def test_any_bytes_are_a_file_or_a_value_error(data):
    try: checkpoint._parse(np.frombuffer(data, np.uint8), "x")
    except ValueError as e: assert str(e) == "x: not a whole safetensors file"


def test_deep_json_is_no_crash(tmp_path):
    text = b"[" * 100_000
    (tmp_path / "deep.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ValueError, match="deep.safetensors: not a whole safetensors file"):
        load_checkpoint(tmp_path / "deep.safetensors", Model())


def test_write_safetensors(tmp_path):
    info = write_safetensors(tmp_path / "a", dict(x=torch.ones(2, 3).T, y=np.ones((2, 3), order="F")), dict(k="v"))
    assert load_file(tmp_path / "a")["x"].tolist() == np.ones((3, 2)).tolist() and info["bytes"] == (tmp_path / "a").stat().st_size
    with pytest.raises(FileExistsError): write_safetensors(tmp_path / "a", {})


# Names

def test_names_of_a_compiled_or_wrapped_model_are_plain(tmp_path):
    model, optimizer = made()
    partly = made()[0]
    partly.norm = torch.compile(partly.norm)
    assert "norm._orig_mod.weight" in partly.state_dict()
    for wrapped in (torch.compile(model), nn.DataParallel(model), torch.compile(nn.DataParallel(model)), nn.DataParallel(torch.compile(model)), partly):
        assert list(unique_tensors(wrapped)) == list(unique_tensors(model))
    save_checkpoint(torch.compile(nn.DataParallel(model)), optimizer, 1, tmp_path / "a")
    other = made(0)
    load_checkpoint(tmp_path / "a", nn.DataParallel(torch.compile(other[0])), other[1])
    assert equal(values(model, optimizer), values(*other))
    load_checkpoint(tmp_path / "a", partly, half := AdamW(parameter_groups(partly, 0.)))
    assert list(named_state(partly, half)["state"]) == list(named_state(model, optimizer)["state"])
    own = nn.ModuleDict(dict(module=nn.Linear(1, 1)))                                # A part that only happens to be called so
    assert list(unique_tensors(own)) == ["module.weight", "module.bias"]


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    path = saved(tmp_path)
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    model, optimizer = made(0)
    load_checkpoint(path, model, optimizer)
    assert model.lm_head.weight is model.token_embeddings.weight
    rows = np.arange(6.).reshape(2, 3)
    assert list(unique_tensors(dict(a=rows, b=rows, c=rows.T, d=rows[:1], e=np.zeros(0), f=np.zeros(0)))) == ["a", "c", "d", "e", "f"]


def test_whole_tensors_as_dictionaries(tmp_path):
    model, optimizer = made()
    as_dicts = unique_tensors(model), named_state(model, optimizer)
    save_checkpoint(*as_dicts, 4, tmp_path / "dicts", state=dict(a=1))
    save_checkpoint(model, optimizer, 4, tmp_path / "objects", state=dict(a=1))
    for name in checkpoint.FILES: assert (tmp_path / "dicts" / name).read_bytes() == (tmp_path / "objects" / name).read_bytes()
    weights, moments = {n: torch.zeros_like(t) for n, t in as_dicts[0].items()}, {}
    assert load_checkpoint(tmp_path / "objects", weights, moments) == 4
    assert equal(weights, as_dicts[0]) and moments["kind"] == "AdamW" and moments["param_groups"] == as_dicts[1]["param_groups"]
    assert all(torch.equal(moments["state"][n][k], t) if hasattr(t, "dtype") else moments["state"][n][k] == t
               for n, s in as_dicts[1]["state"].items() for k, t in s.items())
    plain = {k: v for k, v in as_dicts[1].items() if k != "kind"}                    # As torch's own functions give it
    save_checkpoint(as_dicts[0], plain, 4, tmp_path / "plain")
    assert load_checkpoint(tmp_path / "plain", *(other := made(0))) == 4 and equal(values(*other), values(model, optimizer))


# Random states

@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64])
def test_generators(tmp_path, kind):
    new = lambda seed: dict(data=np.random.Generator(kind(seed)), own=torch.Generator().manual_seed(seed))
    draw = lambda g: (g["data"].normal(size=3).tolist(), g["data"].integers(1 << 16, size=3, dtype=np.uint16).tolist(), torch.rand(3, generator=g["own"]).tolist())
    one, other = new(1), new(2)
    draw(one)
    path = saved(tmp_path, generators=one)
    assert load_checkpoint(path, Model(), generators=other) == 1
    assert draw(one) == draw(other) and draw(one) == draw(other)


def test_generators_that_do_not_fit(tmp_path):
    path = saved(tmp_path, generators=dict(data=np.random.default_rng(1)))
    model, optimizer = made(1)
    before, draws = {k: v.clone() for k, v in values(model, optimizer).items()}, np.random.default_rng(3)
    for generators, words in ((dict(other=draws), "no generator 'other' there \\(saved: data"), (dict(data=torch.Generator()), "'data' is PCG64 there, torch here"),
                              (dict(data=np.random.Generator(np.random.Philox(1))), "'data' is PCG64 there, Philox here")):
        with pytest.raises(ValueError, match=words): load_checkpoint(path, model, optimizer, generators=generators)
    assert equal(values(model, optimizer), before) and draws.integers(1000) == np.random.default_rng(3).integers(1000)


def test_weights_alone_leave_random_states(tmp_path):
    path = saved(tmp_path)
    other = made(0)
    before = torch.get_rng_state()
    torch.rand(1)
    after = torch.get_rng_state()
    load_checkpoint(path, other[0])
    assert torch.equal(torch.get_rng_state(), after) and not other[1].state
    load_checkpoint(path, *other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.cuda
def test_on_a_graphics_card(tmp_path):
    model, optimizer = made()
    model.cuda()
    torch.rand(1, device="cuda")
    state = torch.cuda.get_rng_state()
    path = saved(tmp_path, model, AdamW(model.parameters()))
    drawn = torch.rand(3, device="cuda")
    load_checkpoint(path, model, AdamW(model.parameters()))
    assert torch.equal(torch.rand(3, device="cuda"), drawn) and not torch.equal(torch.cuda.get_rng_state(), state)
    load_checkpoint(path, here := made(0)[0])
    assert all(torch.equal(a.cpu(), b) for a, b in zip(model.parameters(), here.parameters()))


# What is refused

def test_what_is_refused_changes_nothing(tmp_path):
    path = saved(tmp_path, config=dict(model=dict(d_model=4)))
    other = made(1)
    before = {k: v.clone() for k, v in values(*other).items()}
    bad = path.with_name("bad")
    for name in ("model.safetensors", "optimizer.safetensors", "config.json", "state.json"):
        for change in (lambda b: b[:-2], lambda b: b[:10], lambda b: b"", lambda b: b + b" ", lambda b: None):
            shutil.copytree(path, bad)
            (bad / name).unlink()
            if (content := change((path / name).read_bytes())) is not None:
                (bad / name).write_bytes(content)
            with pytest.raises((ValueError, FileNotFoundError), match=name) as e:
                load_checkpoint(bad, *other, config=dict(model=dict(d_model=4)))
            assert "\n" not in str(e.value)
            shutil.rmtree(bad)
    for fits, words in ((Model(width=8), r"float32 \[10, 4\] there, float32 \[10, 8\]"), (Model(tied=False), "lm_head.weight is in the model, but not there")):
        with pytest.raises(ValueError, match=words):
            load_checkpoint(path, fits)
    with pytest.raises(ValueError, match="model.d_model is 4 there, 8 here"):
        load_checkpoint(path, *other, config=dict(model=dict(d_model=8)))
    with pytest.raises(ValueError, match="model.layers is None there, 2 here"):
        load_checkpoint(path, *other, config=dict(model=dict(layers=2)))
    with pytest.raises(ValueError, match="the optimizer is AdamW there, SGD here"):
        load_checkpoint(path, other[0], torch.optim.SGD(other[0].parameters()))
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_checkpoint(tmp_path / "nothing", *other)
    with pytest.raises(TypeError, match="opened as text, expected bytes"):
        load_checkpoint(io.StringIO("text"), *other)
    save_checkpoint(other[0], None, 1, tmp_path / "weights")
    with pytest.raises(ValueError, match="weights: saved without an optimizer"):
        load_checkpoint(tmp_path / "weights", *other)
    assert equal(values(*other), before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "A checkpoint as a folder and as a file, a model that could take it, and its values before."
    folder = tmp_path_factory.mktemp("whole")
    for name in ("folder", "one.safetensors"): save_checkpoint(*made(), 7, folder / name, dict(model=dict(d_model=4)), dict(a=[1.5] * 10))
    other = made(1)
    return folder, other, {k: v.clone() for k, v in values(*other).items()}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "optimizer.safetensors", "state.json", "one.safetensors"])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_seen(whole, name, data):
    folder, other, before = whole
    file = folder / ("" if name.startswith("one") else "folder") / name
    content = file.read_bytes()
    bits = data.draw(st.sets(st.integers(0, 8 * len(content) - 1), min_size=1, max_size=3))
    changed = bytearray(content)
    for i in bits: changed[i // 8] ^= 1 << i % 8
    try:
        file.write_bytes(changed)
        with pytest.raises(ValueError, match=name) as e: load_checkpoint(folder / "one.safetensors" if name.startswith("one") else folder / "folder", *other)
        assert "\n" not in str(e.value) and equal(values(*other), before)
        if name.startswith("one"):
            with pytest.raises(ValueError): load_checkpoint(io.BytesIO(changed), *other)
    finally: file.write_bytes(content)


def test_every_truncation_of_one_file_is_seen(whole):
    folder, other, before = whole
    content = (folder / "one.safetensors").read_bytes()
    for n in {*range(0, len(content), 101), 1, 7, 8, 9, len(content) - 1}:
        with pytest.raises(ValueError, match="the file object: not a whole safetensors file"): load_checkpoint(io.BytesIO(content[:n]), *other)
    assert equal(values(*other), before)


def test_foreign_files(tmp_path):
    save_file(dict(a=torch.zeros(1)), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors: not written by save_checkpoint"): load_checkpoint(tmp_path / "model.safetensors", Model())
    (tmp_path / "state.json").write_text(json.dumps(dict(step=1)))
    with pytest.raises(ValueError, match="not written by save_checkpoint"): load_checkpoint(tmp_path, Model())
    torch.save(Model().state_dict(), tmp_path / "pickle.pt")
    with pytest.raises(ValueError, match="pickle.pt: not a whole safetensors file"): load_checkpoint(tmp_path / "pickle.pt", Model())
    a, b = (saved(tmp_path / name, *made(steps)) for name, steps in (("a", 2), ("b", 3)))
    shutil.copy(b / "model.safetensors", a / "model.safetensors")                    # Of the same size, from another run
    with pytest.raises(ValueError, match="model.safetensors: its SHA-256 is not"): load_checkpoint(a, Model())


def test_no_pickle(tmp_path, monkeypatch):
    import pickle
    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    load_checkpoint(saved(tmp_path), *made(0))


def test_what_can_not_be_saved_is_told_before_anything_is_written(tmp_path):
    cases = [((*made(), -1), {}, ValueError, "iteration = -1"), ((*made(), 1.5), {}, ValueError, "iteration = 1.5"),
             ((made()[0], made()[1], 1), {}, ValueError, "a parameter that is not the model's"), ((Model(), 3, 1), {}, TypeError, "optimizer: int, expected"),
             ((*made(), 1), dict(state=dict(bad=object())), TypeError, r"state\['bad'\] is <object"), ((*made(), 1), dict(state=dict(a={1: 2})), TypeError, "has the key 1"),
             ((*made(), 1), dict(config=dict(a=[np.float32(1)])), TypeError, r"config\['a'\]\[0\] is np.float32"),
             ((nn.Linear(1, 1, dtype=torch.complex64), None, 1), {}, TypeError, "complex64 can't be saved")]
    for args, more, kind, words in cases:
        for out in (tmp_path / "new", tmp_path / "new.safetensors"):
            with pytest.raises(kind, match=words): save_checkpoint(*args, out, **more)
            assert not any(tmp_path.iterdir())


def test_what_is_not_a_checkpoint_is_not_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("years of work")
    for name in ("mine", "file"):
        with pytest.raises(FileExistsError, match=f"{name}: it exists, and it is not a checkpoint"): save_checkpoint(*made(), 1, tmp_path / name)
    with pytest.raises(OSError, match="checkpoint not saved"): save_checkpoint(*made(), 1, tmp_path / "file/below")
    assert (tmp_path / "mine/thesis.txt").read_text() == (tmp_path / "file").read_text() == "years of work" and len(list(tmp_path.iterdir())) == 2
    (tmp_path / "empty").mkdir()
    save_checkpoint(*made(), 1, tmp_path / "empty")
    assert load_checkpoint(tmp_path / "empty", Model()) == 1


# The disk

@pytest.mark.parametrize("name", ["folder", "one.safetensors"])
def test_a_disk_that_takes_only_so_many_bytes(tmp_path, name):
    resource = pytest.importorskip("resource")
    save_checkpoint(*made(2), 1, tmp_path / name)
    sizes = [f.stat().st_size for f in (tmp_path / name).iterdir()] if name == "folder" else [(tmp_path / name).stat().st_size]
    expected = {k: v.clone() for k, v in values(*made(2)).items()}
    limits, failures = resource.getrlimit(resource.RLIMIT_FSIZE), 0
    for n in {0, 1, 8, 100, *(s - 1 for s in sizes), max(sizes) // 2}:
        resource.setrlimit(resource.RLIMIT_FSIZE, (n, limits[1]))                    # The system itself refuses the byte after the n-th
        try: save_checkpoint(*made(3), 2, tmp_path / name)
        except OSError as e:
            failures += 1
            assert e.errno == errno.EFBIG and str(e) == f"[Errno 27] checkpoint not saved: File too large: '{tmp_path / name}'"
        finally: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert load_checkpoint(tmp_path / name, *(other := made(0))) == 1 and equal(values(*other), expected), n
        assert [p.name for p in tmp_path.iterdir()] == [name]
    assert failures >= 5


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_a_file_object():
    with pytest.raises(OSError, match="No space left on device"), open("/dev/full", "wb", buffering=0) as f: save_checkpoint(*made(), 1, f)


@pytest.mark.parametrize("owner, name, error, words", [
    (Path, "mkdir", errno.EROFS, "Read-only file system"), (Path, "mkdir", errno.EACCES, "Permission denied"), (checkpoint, "_write", errno.ENOSPC, "No space left on device"),
    (os, "fsync", errno.EIO, "Input/output error"), (os, "rename", errno.EACCES, "Permission denied"),
    (os, "replace", errno.EACCES, "Permission denied")])
def test_what_the_system_refuses_is_one_line_and_loses_nothing(tmp_path, monkeypatch, owner, name, error, words):
    run = Checkpoints(tmp_path / "run")
    run.save(*made(2), 1)
    run.save(*made(2), 2)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    real = getattr(owner, name)
    for step in (2, 3):
        for at in range(100):
            calls = iter(range(1000))
            def refuse(*args, **kw):
                if next(calls) == at: raise OSError(error, os.strerror(error))
                return real(*args, **kw)
            monkeypatch.setattr(owner, name, refuse)
            try: run.save(*made(3), step)
            except OSError as e:
                assert type(e) is type(OSError(error, "")) and words in str(e) and "\n" not in str(e)
                monkeypatch.setattr(owner, name, real)
                loaded = load_checkpoint(run.latest(), *(other := made(0)))
                if loaded == step and equal(values(*other), values(*made(3))): break  # Refused after it was in its place
                assert loaded == 2 and equal(values(*other), values(*made(2)))
                assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if ".old" not in str(p)} == before and "checkpoint not saved" in str(e)
            else: break
        monkeypatch.setattr(owner, name, real)
        shutil.rmtree(tmp_path / "run")
        run.save(*made(2), 1), run.save(*made(2), 2)
        before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(tmp_path):
    run = Checkpoints(tmp_path / "run")
    run.save(*made(), 1)
    (tmp_path / "run").chmod(0o555)
    try:
        with pytest.raises(PermissionError, match="checkpoint not saved: Permission denied"): run.save(*made(), 2)
        assert load_checkpoint(run.latest(), Model()) == 1
    finally: (tmp_path / "run").chmod(0o755)


def test_everything_is_synced_before_it_gets_its_name(tmp_path, monkeypatch):
    events, rename, sync = [], os.rename, files.sync
    monkeypatch.setattr(files, "sync", lambda p: (events.append(("sync", p.name)), sync(p)))
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append(("rename", b.name)), rename(a, b)))
    monkeypatch.setattr(os, "replace", os.rename)
    path = Checkpoints(tmp_path / "run").save(*made(), 1)
    at = events.index(("rename", path.name))
    assert {name for _, name in events[:at]} == {f.name for f in path.iterdir()} | {"step_000001.tmp"}
    assert events[at - 1:] == [("sync", "step_000001.tmp"), ("rename", path.name), ("sync", "run")]
    events.clear()
    save_checkpoint(*made(), 1, tmp_path / "a.safetensors")
    assert events == [("sync", "a.safetensors.tmp"), ("rename", "a.safetensors"), ("sync", tmp_path.name)]


# The checkpoints of a run

def test_keep_and_order(tmp_path):
    one, run = made(), Checkpoints(tmp_path, keep=3)
    for step in (9, 10, 999_999, 1_000_000): run.save(*one, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000010", "step_1000000", "step_999999"]
    assert run.latest().name == "step_1000000" and run.best() is None
    assert Checkpoints(tmp_path, keep=1).save(*one, 5).is_dir()                      # What was just asked for is never the one to go
    (tmp_path / "step_2000000").write_text("a file")
    (tmp_path / "step_3000000.tmp").mkdir()
    (tmp_path / "step_x").mkdir()
    assert run.latest().name == "step_1000000"
    assert Checkpoints(tmp_path / "nothing").latest() is Checkpoints(tmp_path / "nothing").best() is None
    for step in (1_000_000, 2_000_000, 3_000_000): Checkpoints(tmp_path / "long", keep=2).save(*one, step)
    assert sorted(p.name for p in (tmp_path / "long").iterdir()) == ["step_2000000", "step_3000000"]


def test_a_file_is_no_folder_of_checkpoints(tmp_path):
    "Said at once, not by the first save"
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(NotADirectoryError, match="checkpoints: a file, expected a folder of checkpoints"): Checkpoints(tmp_path / "checkpoints")


@settings(deadline=None, max_examples=15)
@given(losses=st.lists(st.one_of(st.none(), st.sampled_from([1.5, 2., 2.5, float("nan"), float("inf"), -1.])), min_size=1, max_size=7), keep=st.integers(1, 3))
def test_the_last_and_the_best_are_kept(tmp_path_factory, losses, keep):
    folder, one = tmp_path_factory.mktemp("run"), made()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)                              # Nothing is cut off here
        for step, loss in enumerate(losses): Checkpoints(folder, keep).save(*one, step, loss, state=dict(a=step))
    ranked = sorted((loss, step) for step, loss in enumerate(losses) if loss is not None and loss == loss)
    names = {step for _, step in ranked[:1]} | set(range(len(losses))[-keep:])
    assert sorted(int(p.name[5:]) for p in folder.iterdir()) == sorted(names)
    run = Checkpoints(folder)                                                        # From the files alone
    assert run.latest().name == f"step_{len(losses) - 1:06d}"
    if ranked: assert run.best().name == f"step_{ranked[0][1]:06d}" and read_state(run.best()) == dict(a=ranked[0][1], valid_loss=ranked[0][0])


def test_a_damaged_checkpoint_is_not_the_best(tmp_path):
    run = Checkpoints(tmp_path)
    for step, loss in ((1, 1.), (2, 2.)): run.save(*made(), step, loss)
    (tmp_path / "step_000001/state.json").write_text("{}")
    assert run.best().name == "step_000002"


def test_a_second_save_of_a_step_replaces_the_first(tmp_path):
    run = Checkpoints(tmp_path)
    run.save(*made(), 5, state=dict(which=1))
    path = run.save(*made(), 5, state=dict(which=2))
    assert read_state(path)["which"] == 2 and [p.name for p in tmp_path.iterdir()] == ["step_000005"]


def test_a_link_to_a_checkpoint_still_leads_to_it(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "last").symlink_to("disk")
    for k in (1, 2):
        save_checkpoint({"w": np.full(3, float(k))}, None, k, tmp_path / "last")
        assert (tmp_path / "last").is_symlink() and load_checkpoint(tmp_path / "disk", {"w": np.zeros(3)}) == k
    assert {p.name for p in tmp_path.iterdir()} == {"disk", "last"}


def test_what_an_interrupted_save_left_is_in_nobodys_way(tmp_path):
    (tmp_path / "a.tmp").mkdir()
    for file in (tmp_path / "a.tmp/state.json", tmp_path / "b.safetensors.tmp"): file.write_text("half")
    for name in ("a", "b.safetensors"):
        save_checkpoint(*made(), 5, tmp_path / name)
        assert load_checkpoint(tmp_path / name, Model()) == 5
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b.safetensors"}


def test_a_first_save_that_is_set_aside_counts_until_the_second_is_there(tmp_path):
    save_checkpoint(*made(), 5, tmp_path / "a")
    os.rename(tmp_path / "a", tmp_path / "a.old")
    assert load_checkpoint(tmp_path / "a", Model()) == 5
    save_checkpoint(*made(), 6, tmp_path / "a")
    assert load_checkpoint(tmp_path / "a", Model()) == 6 and [p.name for p in tmp_path.iterdir()] == ["a"]


# Two engines

ENGINE = [ModelConfig(vocab_size=40, context_length=8, d_model=16, num_layers=2, num_heads=2, tie_embeddings=tied) for tied in (True, False)]


def numpy_engine(config, steps, seed=0):
    params, rng = init_params(config, seed), np.random.default_rng(seed)
    optimizer = AdamWNp(params, (0.8, 0.95), 1e-6, 0.2, learning_rate_scales(config))
    numpy_steps(params, optimizer, rng, config, steps)
    return params, optimizer, rng


def numpy_steps(params, optimizer, rng, config, steps):
    for _ in range(steps):
        ids = rng.integers(40, size=(4, 9))
        optimizer.step(loss_and_grads(params, ids[:, :-1], ids[:, 1:], config)[1], 1e-2)


def arrays(params, optimizer, rng=None):
    return params | {f"{k}.{n}": a for k in "mv" for n, a in getattr(optimizer, k).items()} | dict(t=np.array(optimizer.t))


def same_arrays(a, b):
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and np.array_equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("config", ENGINE, ids=["tied", "untied"])
@pytest.mark.parametrize("cut", [0, 1, 3])
def test_the_numpy_engine_goes_on_bit_for_bit(tmp_path, config, cut):
    half = numpy_engine(config, cut)
    save_checkpoint(*half[:2], cut, tmp_path / "a", config.to_dict(), generators=dict(data=half[2]))
    other = numpy_engine(config, 2, seed=5)
    other[1].betas, other[1].weight_decay = (0.5, 0.5), 9.
    assert load_checkpoint(tmp_path / "a", *other[:2], config.to_dict(), dict(data=other[2])) == cut
    numpy_steps(*other, config, 5 - cut)
    assert same_arrays(arrays(*other), arrays(*numpy_engine(config, 5))) and other[1].betas == (0.8, 0.95) and other[1].weight_decay == 0.2


@pytest.mark.parametrize("config", [*ENGINE, replace(ENGINE[1], mup_base_width=8)], ids=["tied", "untied", "muP"])
def test_across_the_engines_and_back(tmp_path, config):
    one = numpy_engine(config, 3)
    save_checkpoint(*one[:2], 3, tmp_path / "numpy", config.to_dict())
    model = TransformerLM(config, seed=9)
    optimizer = AdamW(parameter_groups(model, 0.1), lr=0.5)
    assert load_checkpoint(tmp_path / "numpy", model, optimizer, config.to_dict()) == 3
    state = named_state(model, optimizer)
    kinds = [(0.5, 0.2)]*bool(config.mup_base_width) + [(1, 0.2), (1, 0.)]
    assert [(g.get("lr_scale", 1), g["weight_decay"]) for g in state["param_groups"]] == kinds
    assert all((g["lr"], g["betas"], g["eps"]) == (0.5, (0.8, 0.95), 1e-6) for g in state["param_groups"])
    assert all(np.array_equal(state["state"][n]["exp_avg"], one[1].m[n]) and np.array_equal(state["state"][n]["exp_avg_sq"], one[1].v[n]) and state["state"][n]["step"] == 3 for n in one[0])
    save_checkpoint(model, optimizer, 3, tmp_path / "torch", config.to_dict())
    back = numpy_engine(config, 1, seed=5)
    assert load_checkpoint(tmp_path / "torch", *back[:2], config.to_dict()) == 3
    assert same_arrays(arrays(*back), arrays(*one)) and back[1].betas == (0.8, 0.95)
    ids = np.random.default_rng(0).integers(40, size=(4, 9))                         # And both take the same next step
    back[1].step(loss_and_grads(back[0], ids[:, :-1], ids[:, 1:], config)[1], 1e-2)
    model.loss(*(torch.from_numpy(np.ascontiguousarray(a)) for a in (ids[:, :-1], ids[:, 1:]))).backward()
    for g in optimizer.param_groups: g["lr"] = 1e-2*g.get("lr_scale", 1)
    optimizer.step()
    assert all(np.allclose(p.detach().numpy(), back[0][n], rtol=1e-4, atol=1e-5) for n, p in model.named_parameters())


def test_each_parameter_keeps_its_number_of_steps(tmp_path):
    config = ENGINE[0]
    one, other = numpy_engine(config, 3), numpy_engine(config, 1, seed=5)
    one[1].step({"ln_final.weight": one[0]["ln_final.weight"]}, 1e-2)
    save_checkpoint(*one[:2], 4, tmp_path / "numpy")
    model = TransformerLM(config)
    optimizer = AdamW(parameter_groups(model, 0.1))
    load_checkpoint(tmp_path / "numpy", model, optimizer)
    save_checkpoint(model, optimizer, 4, tmp_path / "torch")
    load_checkpoint(tmp_path / "torch", *other[:2])
    assert other[1].t == one[1].t == dict.fromkeys(one[0], 3) | {"ln_final.weight": 4}


def test_an_optimizer_that_has_not_moved_and_others_that_do_not_fit(tmp_path):
    config = ENGINE[0]
    model = TransformerLM(config)
    fresh = AdamW(parameter_groups(model, 0.1))
    save_checkpoint(model, fresh, 0, tmp_path / "fresh")
    other = numpy_engine(config, 2)
    load_checkpoint(tmp_path / "fresh", *other[:2])
    assert not any(other[1].t.values()) and not any(a.any() for a in (*other[1].m.values(), *other[1].v.values()))
    model.loss(torch.zeros(1, 3, dtype=int), torch.zeros(1, 3, dtype=int)).backward()
    model.ln_final.weight.grad = None
    fresh.step()
    save_checkpoint(model, fresh, 1, tmp_path / "uneven")              # One parameter never had a gradient
    other[1].m["ln_final.weight"].fill(1)
    load_checkpoint(tmp_path / "uneven", *other[:2])
    assert other[1].t == dict.fromkeys(other[0], 1) | {"ln_final.weight": 0} and not other[1].m["ln_final.weight"].any()
    before = {n: a.copy() for n, a in arrays(*other).items()}
    fresh = AdamW(parameter_groups(model, 0.1))
    fresh.param_groups[1]["weight_decay"] = 0.1
    save_checkpoint(model, fresh, 1, tmp_path / "decayed")
    with pytest.raises(ValueError, match="apart from decaying only matrices"): load_checkpoint(tmp_path / "decayed", *other[:2])
    with pytest.raises(ValueError, match="arrays are not the model's"): save_checkpoint(dict(other[0], more=np.zeros(1)), other[1], 1, tmp_path / "a")
    with pytest.raises(ValueError, match="arrays are not the model's"): load_checkpoint(tmp_path / "fresh", init_params(config), other[1])
    assert same_arrays(arrays(*other), before)


# Other processes

WITHOUT_TORCH = """
sys.modules["torch"] = None
import numpy as np
from lmcourse.training.checkpoint import load_checkpoint, save_checkpoint
from lmcourse.training.optim_np import AdamWNp
params = dict(a=np.ones((2, 3), np.float32), b=np.ones(3, np.float32))
o = AdamWNp(params)
o.step(dict(params), 0.1)
save_checkpoint(params, o, 1, sys.argv[1])
expected = params["a"].copy()
params["a"][:] = 0
assert load_checkpoint(sys.argv[1], params, o) == 1 and (params["a"] == expected).all()
"""


def test_numpy_needs_no_torch(tmp_path): script(WITHOUT_TORCH, tmp_path / "a", anew=True)


WORLDS = """
import os, torch, torch._dynamo, torch.distributed as dist # Else each process imports dynamo for itself, as optimizers do
from torch.nn.parallel import DistributedDataParallel as DDP
from lmcourse.training.checkpoint import load_checkpoint, save_checkpoint, unique_tensors, named_state
from lmcourse.training.optim_torch import AdamW, parameter_groups
folder = sys.argv[1]
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
def made(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    return model, AdamW(parameter_groups(model, 0.1))
def steps(model, optimizer, rank, world, n):
    x = torch.arange(48.).reshape(12, 4)/48
    for _ in range(n):
        optimizer.zero_grad()
        model(x[rank::world]).square().mean().backward()
        optimizer.step()
def world(size, work):
    store = f"{folder}/store{size}"
    def rank(r):
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=r, world_size=size)
        work(r)
        dist.barrier()
        dist.destroy_process_group()
    pids = []
    for r in range(size):
        if not (pid := os.fork()):
            try: rank(r)
            except BaseException: import traceback; traceback.print_exc(); os._exit(1)
            os._exit(0)
        pids.append(pid)
    assert not any(os.waitpid(p, 0)[1] for p in pids)
def first(r):
    model, optimizer = made(r)
    steps(ddp := DDP(model), optimizer, r, 2, 3)
    if r == 0: save_checkpoint(ddp, optimizer, 3, f"{folder}/two", state=dict(a=1))
def second(r):
    model, optimizer = made(9)
    ddp = DDP(model)
    assert load_checkpoint(f"{folder}/two", ddp, optimizer) == 3
    steps(ddp, optimizer, r, 3, 2)
    if r == 0: save_checkpoint(ddp, optimizer, 5, f"{folder}/three")
world(2, first)
world(3, second)
one, alone = made(9), made(0)
assert load_checkpoint(f"{folder}/two", *one) == 3
steps(*one, 0, 1, 2)
steps(*alone, 0, 1, 5)
three = made(9)
assert load_checkpoint(f"{folder}/three", *three) == 5
for model, optimizer in (three, alone): # Two, then three processes; one process all the time; two, then one
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(model.parameters(), one[0].parameters()))
    assert all(torch.allclose(s["exp_avg"], named_state(*one)["state"][n]["exp_avg"], rtol=1e-4, atol=1e-6) for n, s in named_state(model, optimizer)["state"].items())
print(list(unique_tensors(three[0])))
"""


@pytest.mark.skipif(not hasattr(os, "fork") or not torch.distributed.is_available(), reason="needs fork and torch.distributed")
def test_what_two_processes_wrote_one_and_three_read(tmp_path):
    said = [line for line in script(WORLDS, tmp_path).splitlines() if not line.startswith("[Gloo]")]       # torch 2.9's gloo tells of its peers
    assert said == ["['0.weight', '0.bias', '2.weight', '2.bias']"]


KILLED = """
import os, shutil
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
                if name == "_write":
                    f(*args, **kw)
                    args[0].flush()
                    args[0].truncate(args[0].tell()//2)
                os._exit(9)
            return f(*args, **kw)
        setattr(owner, name, call)
    for owner,name in ((os, "rename"), (os, "replace"), (os, "fsync"), (os, "unlink"), (os, "rmdir"), (Path, "mkdir"), (c, "_write")):
        wrap(owner, name)
old, new, other = made(1.), made(2.), made(0.)
def all_calls(folder, first, second, keep):
    for n in range(1000):
        run = Path(folder)/str(n)
        c.Checkpoints(run).save(*old, first, state=dict(which=1))
        pid = os.fork()
        if not pid:
            deadly(n)
            c.Checkpoints(run, keep).save(*new, second, state=dict(which=2))
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        latest = c.Checkpoints(run).latest()
        found, step = c.read_state(latest)["which"], c.load_checkpoint(latest, *other)
        assert step == (first, second)[found - 1], (n, found)
        assert (other[0].weight == found).all(), (n, found)
        if not status: break
        assert status == 9, status
        c.Checkpoints(run, keep=1).save(*new, second + 1)
        assert [p.name for p in run.iterdir()] == [f"step_{second + 1:06d}"], n
    assert found == 2
    return n
print(*(all_calls(f"{sys.argv[1]}/{i}", *how) for i,how in enumerate(((1, 2, 1), (1, 2, 2), (2, 2, 1)))))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_every_call(tmp_path): assert min(map(int, script(KILLED, tmp_path).split())) > 10


KILLS = """
import json, os, random, signal, time
from itertools import islice
from pathlib import Path
import torch, torch._dynamo # Else each process imports dynamo for itself, as optimizers do
torch.set_num_threads(1)
from lmcourse.tokenization.tokenizer import Tokenizer
from lmcourse.tools.config import ModelConfig, TrainConfig
from lmcourse.tools.stories import Stories
from lmcourse.training.data import TokenDataset, write_tokens
from lmcourse.training.runs import read_metrics, write_run
from lmcourse.training.trainer import Trainer
work, kills, rng = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
texts = list(islice(Stories(seed=0), 60))
tokenizer = Tokenizer.train(texts, 300)
for name,part in (("train", texts[:50]), ("valid", texts[50:])): write_tokens(work/name, part, tokenizer, "stories")
train, valid = (TokenDataset.open(work/name) for name in ("train", "valid"))
model = ModelConfig(vocab_size=300, context_length=16, d_model=16, num_layers=1, num_heads=2)
config = TrainConfig(steps=40, batch_size=4, warmup_steps=5, eval_every=10, eval_documents=3, checkpoint_every=1, log_every=3, device="cpu")
def begin(name):
    (work/name).mkdir()
    write_run(work/name, model, config, work)
    return work/name
def life(run): # A process that goes on with the run, to its end
    if pid := os.fork(): return pid
    trainer = Trainer(model, config, train, valid)
    trainer.resume(run)
    trainer.fit(run)
    os._exit(0)
def outcome(run):
    last = sorted(run.glob("checkpoints/step_*"))[-1]
    lines = [{k: v for k,v in m.items() if k != "elapsed_s"} for m in read_metrics(run)]
    return last.name, *((last/f"{n}.safetensors").read_bytes() for n in ("model", "optimizer")), lines
start = time.monotonic()
assert not os.waitpid(life(whole := begin("whole")), 0)[1]
seconds, expected = time.monotonic() - start, outcome(whole)
done, inside, finished, run = 0, 0, 0, begin("run0")
while True:
    pid = life(run)
    if done < kills:
        time.sleep(rng.uniform(0, 0.6*seconds))
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -9), status
    if status: done, inside = done + 1, inside + any(not p.name[5:].isdigit() for p in run.glob("checkpoints/step_*"))
    else:
        assert outcome(run) == expected, run
        finished, run = finished + 1, begin(f"run{finished + 1}")
        if done == kills: break
print(json.dumps(dict(kills=done, inside=inside, runs=finished, seconds=time.monotonic() - start)))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_again_and_again_ends_the_same(tmp_path_factory, kills):
    result = json.loads(script(KILLS, tmp_path_factory.mktemp("kills"), kills, kills, seconds=570)) # On a disk, where a save takes longer
    print(result)
    assert result["kills"] == kills and (kills < 50 or result["inside"] >= 5)
