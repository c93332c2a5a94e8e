"""The registry of patches, the patches of Megatron's training loop, and the edits for vendored copies."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import shutil
import sys
import types
import warnings
from pathlib import Path

import pytest
from megatron.core import package_info

from megatron_augtree.config import AugTreeError, UnsupportedError
from megatron_augtree.mcore import patches
from megatron_augtree.mcore.megatron_lm import patches as pretrain_patches
from megatron_augtree.mcore.megatron_lm import pretrain, shims
from megatron_augtree.mcore.patches import Patch, Registry
from tests.mcore import pretrain_cases as cases
from tests.mcore.pretrain_cases import ROOT

TREE = cases.megatron_lm()
needs_tree = pytest.mark.skipif(TREE is None, reason=cases.NEEDS_TREE)


# --- the registry, on modules of its own -----------------------------------------------------------------


@pytest.fixture
def modules(monkeypatch):
    """A module with three functions and a class, and one that imported two of them by name."""
    source = types.ModuleType("a_source")
    exec(
        "def f(a, b): return ('f', a, b)\n"
        "def g(a, *, c=1): return ('g', a, c)\n"
        "class Base:\n    def h(self): return 'h'\n"
        "class K(Base): pass\n",
        vars(source),
    )
    user = types.ModuleType("a_user")
    user.f, user.other = source.f, source.g
    monkeypatch.setitem(sys.modules, "a_source", source)
    monkeypatch.setitem(sys.modules, "a_user", user)
    return source, user


def wrapped(name: str, **fields) -> Patch:
    """A patch that marks the result of a function of ``a_source``."""
    fields = {"parameters": {}, "wrap": lambda old: lambda *a, **k: ("new", old and old(*a, **k))} | fields
    attribute = fields.pop("attribute", name)
    return Patch(name, "a_source", attribute, "a test needs it", **fields)


def everything(modules) -> dict[str, object]:
    """Every attribute, as it is."""
    source, user = modules
    found = {f"{m.__name__}.{n}": v for m in modules for n, v in vars(m).items() if n != "__builtins__"}
    found |= {f"{c.__name__}.{n}": v for c in (source.Base, source.K) for n, v in vars(c).items()}
    return found


def same(a: dict[str, object], b: dict[str, object]) -> bool:
    return a.keys() == b.keys() and all(a[name] is b[name] for name in a)


def test_apply_and_restore_leave_the_same_objects(modules):
    source, user = modules
    before = everything(modules)
    registry = Registry([wrapped("f"), wrapped("g"), wrapped("h", attribute="K.h"),
                         wrapped("missing", optional=True)])
    registry.apply()
    assert source.f(1, b=2) == user.f(1, 2) == ("new", ("f", 1, 2))  # also where it was imported by name
    assert user.other(3, c=4) == ("new", ("g", 3, 4))  # and under another one
    assert source.K().h() == ("new", "h") and source.Base().h() == "h"
    assert source.missing() == ("new", None)
    assert registry.applied() == ("f", "g", "h", "missing")
    inside = everything(modules)
    registry.apply()  # twice is once
    assert same(everything(modules), inside)
    user.late = source.f  # a copy of the replacement, made while it was in place
    registry.restore()
    assert user.late is before["a_source.f"]
    del user.late
    assert same(everything(modules), before) and registry.applied() == ()
    registry.restore()
    assert same(everything(modules), before)


def test_a_failure_half_way_leaves_nothing_behind(modules):
    def fails(old):
        raise RuntimeError("on purpose")

    before = everything(modules)
    registry = Registry([wrapped("f"), wrapped("h", attribute="K.h"), wrapped("g", wrap=fails)])
    with pytest.raises(RuntimeError, match="on purpose"):
        registry.apply()
    assert same(everything(modules), before) and registry.applied() == ()
    # What was in place before the failing call stays.
    registry.apply(["f"])
    with pytest.raises(RuntimeError, match="on purpose"):
        registry.apply()
    assert registry.applied() == ("f",) and modules[0].f(1, 2)[0] == "new"
    registry.restore()
    assert same(everything(modules), before)


@pytest.mark.parametrize(
    "broken, told",
    [
        (wrapped("absent"), "no such attribute"),
        (wrapped("f", parameters={"": ("b", "a")}), "parameters (a, b)"),
        (wrapped("f", parameters={"": ("a", "b", "c")}), "begin with (a, b, c)"),
        (wrapped("f", parameters={patches.release(): ("x",), "": ("a",)}), "begin with (x)"),
        (wrapped("h", attribute="Nothing.h"), "has no attribute 'Nothing'"),
        (Patch("n", "megatron.core.nowhere", "f", "a test needs it", wrap=id), "megatron.core.nowhere"),
    ],
)
def test_a_target_that_does_not_fit_is_refused_before_anything_is_replaced(modules, broken, told):
    before = everything(modules)
    registry = Registry([wrapped("g"), broken])
    with pytest.raises(UnsupportedError) as raised:
        registry.apply()
    assert told in str(raised.value) and package_info.__version__ in raised.value.values
    assert raised.value.rule and "patches/README.md" in raised.value.remedy
    assert same(everything(modules), before)
    states = {row.name: row for row in registry.report()}
    assert states["g"].state == "not applied" and states[broken.name].state == "does not fit"


def test_a_package_that_is_missing_is_named(modules, tmp_path, monkeypatch):
    (tmp_path / "needs_something.py").write_text("import a_package_that_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnsupportedError, match="pip install a_package_that_nobody_has"):
        Registry([Patch("n", "needs_something", "f", "a test needs it", wrap=id)]).apply()


def test_the_report_says_what_is_in_place_and_why(modules):
    source, user = modules
    source.h = pretrain.schedule  # the plug-in's own: put there by hand
    registry = Registry([wrapped("f"), wrapped("g"), wrapped("h"), wrapped("absent", releases=("0.1",))])
    registry.apply(["f", "h"])
    rows = {row.name: row for row in registry.report()}
    assert [rows[name].state for name in ("f", "g", "h", "absent")] == [
        "applied", "not applied", "by hand", "not needed"]
    assert rows["f"].copies == ("a_user.f",) and rows["f"].target == "a_source.f"
    assert "a test needs it" in str(rows["g"]) and "a_user.f" in str(rows["f"])
    assert source.h is pretrain.schedule
    registry.restore()
    alone = Registry([wrapped("f", copies=False)])
    alone.apply()
    assert source.f(1, 2)[0] == "new" and user.f(1, 2)[0] == "f"  # the target and no copy of it
    assert alone.report()[0].copies == ()
    alone.restore()
    assert source.f is user.f
    with pytest.raises(AugTreeError, match="no such patch"):
        registry.apply(["unknown"])


def test_mindspeed_and_unknown_releases(modules, monkeypatch):
    registry = Registry([wrapped("f")])
    monkeypatch.setattr(package_info, "__version__", "0.77.0")
    with pytest.warns(UserWarning, match="not tested with megatron-core 0.77.0"):
        registry.apply()
    registry.restore()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry.apply()  # said once
    registry.restore()
    monkeypatch.setitem(sys.modules, "mindspeed.megatron_adaptor", types.ModuleType("m"))
    with pytest.raises(UnsupportedError, match="MindSpeed"):
        registry.apply()
    assert registry.applied() == ()


# --- the hooks, without Megatron's loop ------------------------------------------------------------------


def parsed(words: str) -> argparse.Namespace:
    """Arguments of a parser that has some of Megatron's."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--data-path", nargs="*")
    parser.add_argument("--split")
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--eval-iters", type=int, default=0)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    args = pretrain.add_arguments(pretrain.add_arguments(parser)).parse_args(words.split())
    args.world_size, args.rank, args.global_batch_size = 4, 0, 2
    return args


@pytest.fixture
def no_run():
    yield
    pretrain.begin(parsed(""))
    assert pretrain.current() is None


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return cases.write_data(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("size", [1, 2])
def test_without_a_mode_the_arguments_are_the_stock_ones(size):
    args = parsed(f"--context-parallel-size {size}" if size > 1 else "")
    pretrain.begin(args)
    pretrain.checked(args)
    assert vars(args).keys() == {
        "context_parallel_size", "data_path", "split", "micro_batch_size", "eval_iters", "world_size", "rank",
        "global_batch_size", "tensor_model_parallel_size"}
    assert args.context_parallel_size == size and type(args.context_parallel_size) is int
    assert pretrain.current() is None
    kwargs = {"context_parallel_size": size}
    pretrain.model_arguments(kwargs)
    pretrain.bound([None])
    assert kwargs == {"context_parallel_size": size}
    assert pretrain.schedule(1, None) is pretrain.stock_schedule(1, None)


@pytest.mark.parametrize(
    "flag, limit", [("", 0), ("--context-parallel-size 1", 1), ("--context-parallel-size 2", 2)])
def test_with_a_mode_the_pool_is_one_context_parallel_group(data, no_run, capsys, flag, limit):
    args = parsed(f"--context-parallel-mode augtree --data-path {data} --split 2,1 --groups 0:3 "
                  f"--tensor-model-parallel-size 2 {flag}")
    pretrain.begin(args)
    # What Megatron's validation sees, and counts micro-batches with.
    assert args.world_size == 2 and args.context_parallel_size == 1
    assert args.calculate_per_token_loss and args.dataloader_type == "external"
    pretrain.begin(args)  # by hand and by a patch
    pretrain.checked(args)
    pretrain.checked(args)
    assert args.world_size == 4 and args.context_parallel_size == 2
    run = pretrain.current()
    assert run.config.degree == limit
    assert {name: len(groups) for name, groups in run.splits.items()} == {"train": 2, "valid": 1, "test": 0}
    assert "--context-parallel-mode augtree; 2 ranks a pool" in capsys.readouterr().out
    kwargs = {"context_parallel_size": 2}
    pretrain.model_arguments(kwargs)
    assert kwargs == {"context_parallel_size": 1}
    assert pretrain.schedule() is pretrain.play


@pytest.mark.parametrize(
    "words, told",
    [
        ("--augtree-min-shared-rows 4", "--augtree-min-shared-rows 4"),
        ("--objective grpo", "--objective grpo"),
        ("--shuffle", "--shuffle True"),
        ("--context-parallel-mode ring", "no groups"),
        ("--context-parallel-mode ring --data-path nowhere", "nowhere"),
        ("--context-parallel-mode ring --data-path DATA --groups 5:99", "--groups 5:99"),
        ("--context-parallel-mode ring --data-path DATA --split a,b", "--split a,b"),
        ("--context-parallel-mode ring --data-path DATA --eval-iters 1", "no groups for validation"),
        ("--context-parallel-mode ring --data-path DATA --micro-batch-size 2", "--micro-batch-size 2"),
        ("--context-parallel-mode ring --data-path DATA --tensor-model-parallel-size 3", "4 ranks"),
        ("--context-parallel-mode ring --data-path DATA --augtree-kernel cpu_flush", "cpu_flush"),
        ("--context-parallel-mode ring --data-path DATA --clip-low 0.1", "--clip-low 0.1"),
        ("--context-parallel-mode ring --data-path DATA --objective grpo --loss-preset grpo", "ref_logprobs"),
    ],
)
def test_what_cannot_run_says_why(data, words, told):
    with pytest.raises(AugTreeError) as raised:
        pretrain.begin(parsed(words.replace("DATA", str(data))))
    assert told in str(raised.value) and raised.value.rule and raised.value.remedy
    assert pretrain.current() is None


def test_a_wrong_mode_is_told_the_closest(capsys):
    with pytest.raises(SystemExit):
        parsed("--context-parallel-mode augtre")
    assert "did you mean augtree?" in capsys.readouterr().err


def test_text_is_refused(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text('{"prompt": "ab", "responses": [{"tokens": "c"}]}\n')
    with pytest.raises(AugTreeError, match="token ids are expected"):
        pretrain.begin(parsed(f"--context-parallel-mode ring --data-path {path}"))


# --- edits for vendored copies ---------------------------------------------------------------------------


def load_check() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("augtree_check_edits", ROOT / "patches" / "check.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check = load_check()
TABLES = sorted((ROOT / "patches").glob("*/edits.json"))


def copy_of(folder: Path, release: str, texts: dict[str, str]) -> Path:
    """A folder that looks like a copy of Megatron-LM."""
    major, minor = release.split(".")
    texts = {**texts, "megatron/core/package_info.py": f"MAJOR = {major}\nMINOR = {minor}\n"}
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.parent.name)
def test_the_checker_tells_there_missing_and_does_not_fit(tmp_path, table, capsys):
    release = json.loads(table.read_text())["release"]
    edits = check.edits_for(release)
    assert release in patches.TESTED and len(edits) == 7 and (table.parent / "README.md").is_file()
    texts: dict[str, str] = {}
    for edit in edits:
        texts[edit.file] = texts.get(edit.file, "") + f"# before\n{edit.anchor}\n# behind\n"
    folder = copy_of(tmp_path / "copy", release, texts)
    assert check.states(folder, edits) == ["missing"] * 7
    assert check.main([str(folder)]) == 1
    assert check.main([str(folder), "--apply"]) == 0 and check.states(folder, edits) == ["there"] * 7
    after = {name: (folder / name).read_text() for name in texts}
    assert check.main([str(folder), "--apply"]) == 0
    assert after == {name: (folder / name).read_text() for name in texts}
    for edit in edits:
        inserted = "\n".join(edit.lines)
        order = [inserted, edit.anchor] if edit.where == "before" else [edit.anchor, inserted]
        assert "\n".join(order) in after[edit.file]
        assert all(f"augtree.{hook}" not in inserted or hasattr(pretrain, hook)
                   for hook in ("add_arguments", "begin", "checked", "model_arguments", "bound", "datasets"))
    # An anchor that is gone, or there twice: nothing is written at all.
    for text in ("", f"{edits[-1].anchor}\n{edits[-1].anchor}\n"):
        broken = copy_of(tmp_path / f"broken{len(text)}", release, {**texts, edits[-1].file: text})
        assert check.states(broken, edits)[-1] == "does not fit"
        capsys.readouterr()
        assert check.main([str(broken), "--apply"]) == 1
        assert "does not fit" in capsys.readouterr().out
        assert (broken / edits[0].file).read_text() == {**texts, edits[-1].file: text}[edits[0].file]


def test_the_checker_knows_its_releases(tmp_path, capsys):
    assert check.main([str(copy_of(tmp_path, "0.3", {}))]) == 1
    assert "release 0.3; there are edits for 0.16.1, 0.19.0" in capsys.readouterr().err
    assert check.main([str(tmp_path / "nowhere")]) == 1


# --- with a copy of Megatron-LM --------------------------------------------------------------------------


@needs_tree
def test_every_edit_fits_the_copy(tmp_path):
    for edit in check.edits_for(check.release_of(TREE)):
        target = tmp_path / edit.file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TREE / edit.file, target)
    copy_of(tmp_path, check.release_of(TREE), {})
    assert check.main([str(tmp_path), "--apply"]) == 0
    for path in tmp_path.glob("megatron/training/*.py"):
        ast.parse(path.read_text())


@needs_tree
def test_every_patch_and_shim_fits_the_copy_and_goes_again(monkeypatch):
    monkeypatch.syspath_prepend(str(TREE))
    registry = pretrain_patches.REGISTRY
    with shims.script_shims():
        assert {row.state for row in registry.report()} == {"not applied"}  # imports all targets
        before = {name: dict(vars(module)) for name, module in sys.modules.items()
                  if name.startswith(("megatron", "torch")) and isinstance(module, types.ModuleType)}
        registry.apply()
        assert {row.state for row in registry.report()} == {"applied"}
        changed = [f"{name}.{key}" for name, found in before.items() for key, value in found.items()
                   if vars(sys.modules[name]).get(key) is not value]
        assert len(changed) >= len(registry.patches)
        assert all(name.startswith("megatron.training.") for name in changed)  # megatron-core is as it was
        registry.restore()
        for name, found in before.items():
            assert all(vars(sys.modules[name]).get(key) is value for key, value in found.items()), name
