"""Checkpoints: a run resumes to the bit, and what is broken or belongs to another run says so."""

from __future__ import annotations

import json
import os
import random
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors.torch import load_file

from megatron_augtree.config import InputError, UnsupportedError
from megatron_augtree.mcore import build, checkpoint, launch
from megatron_augtree.runtime.transport import LocalTransport
from tests.mcore import launcher_cases as cases

GRPO = "--global-batch-size 2 --objective grpo --optimizer sgd --lr 0.1 --dtype float64"
AUGTREE = "--context-parallel-mode augtree"


@pytest.fixture(scope="module", autouse=True)
def megatron():
    args = cases.example.parser().parse_args(f"{cases.STOCK_MODEL} --data-path none --train-iters 1".split())
    launch.start(args)
    yield
    build.destroy()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return cases.write_data(tmp_path_factory.mktemp("data"))


def close(a, b, bound: float = 1e-10) -> bool:
    return abs(a - b) <= bound * max(1.0, abs(b))


# --- resuming --------------------------------------------------------------------------------------------


@pytest.fixture
def drawing(monkeypatch):
    """Every step draws from every random state; returns what was drawn."""
    drawn = []
    step = cases.example.Trainer.step

    def draw(self, batch):
        record = step(self, batch)
        with get_cuda_rng_tracker().fork():
            tracked = float(torch.rand(()))
        drawn.append((float(torch.rand(())), tracked, random.random(), float(np.random.rand())))
        return record

    monkeypatch.setattr(cases.example.Trainer, "step", draw)
    return drawn


@pytest.mark.parametrize(
    "flags",
    [
        f"{AUGTREE} --shuffle",
        f"{AUGTREE} --dtype float64 --optimizer sgd --sgd-momentum 0.9",
        f"{AUGTREE} --dtype float64 --shuffle --num-workers 1",
        f"{AUGTREE} --dtype bfloat16",
        f"{AUGTREE} --use-distributed-optimizer --shuffle",
        f"{AUGTREE} --use-distributed-optimizer --dtype bfloat16",
        "--shuffle",
        "--context-parallel-mode ring-reuse-per-response --objective grpo --weight-decay 0.1 --clip-grad 0.5",
        f"{AUGTREE} --shuffle --ckpt-format torch_dist",
        f"{AUGTREE} --dtype float64 --optimizer sgd --sgd-momentum 0.9 --ckpt-format torch_dist",
        f"{AUGTREE} --dtype float64 --swiglu --ckpt-format torch_dist",
        f"{AUGTREE} --dtype bfloat16 --ckpt-format torch_dist",
        f"{AUGTREE} --use-distributed-optimizer --dtype bfloat16 --ckpt-format torch_dist",
        "--shuffle --use-distributed-optimizer --ckpt-format torch_dist",
    ],
)
def test_two_and_two_steps_are_four(data, tmp_path, drawing, flags):
    flags = f"{flags} --global-batch-size 2 --lr 0.01"

    def run(more: str):
        launch.build.model_parallel_cuda_manual_seed(5, force_reset_rng=True)
        records, trainer = cases.train(data, f"{flags} {more}")
        taken, drawing[:] = list(drawing), []
        return records, cases.state_of(trainer), taken

    whole, whole_state, whole_drawn = run("--train-iters 4")
    first, first_state, first_drawn = run(f"--train-iters 2 --save {tmp_path}")
    rest, rest_state, rest_drawn = run(f"--train-iters 4 --load {tmp_path}")
    assert not cases.differing(whole_state, rest_state)
    assert len(cases.differing(first_state, rest_state)) > 10
    assert cases.numbers(first) + cases.numbers(rest) == cases.numbers(whole)
    assert [r.iteration for r in rest] == [3, 4]
    assert first_drawn + rest_drawn == whole_drawn and len(set(whole_drawn)) == 4


@pytest.mark.parametrize("there, here", [(2, 3), (3, 1)])
def test_resumes_on_other_ranks_and_in_another_mode(data, tmp_path, there, here):
    flags = f"{GRPO} --optimizer adam"
    whole, _ = cases.train(data, f"{flags} --train-iters 4 {AUGTREE}", LocalTransport(there))
    cases.train(data, f"{flags} --train-iters 2 --save {tmp_path} {AUGTREE}", LocalTransport(there))
    rest, _ = cases.train(
        data, f"{flags} --train-iters 4 --load {tmp_path} --context-parallel-mode ring", LocalTransport(here)
    )
    # Adam amplifies the rounding of near-zero gradients.
    assert all(close(a.loss, b.loss, 1e-6) for a, b in zip(rest, whole[2:], strict=True))


def test_a_learning_rate_given_on_resuming_counts(data, tmp_path):
    flags = f"--global-batch-size 2 {AUGTREE}"
    cases.train(data, f"{flags} --train-iters 1 --lr 0.01 --save {tmp_path}")
    _, trainer = cases.train(data, f"{flags} --train-iters 1 --lr 0.003 --load {tmp_path}")
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {0.003}


def test_finetune_takes_the_weights_only(data, tmp_path):
    _, saved = cases.train(data, f"{GRPO} --train-iters 2 --save {tmp_path} {AUGTREE}")
    # Another optimizer is no obstacle then.
    flags = f"{AUGTREE} --dtype float64 --optimizer adam --train-iters 1 --load {tmp_path} --finetune"
    trainer = cases.example.Trainer(cases.prepared(data, flags))
    assert trainer.progress.iteration == trainer.progress.consumed_groups == 0
    for name, parameter in trainer.ddp.module.named_parameters():
        assert torch.equal(parameter, dict(saved.ddp.module.named_parameters())[name]), name


def test_other_data_start_at_their_first_group(data, tmp_path, capsys):
    cases.train(data, f"{GRPO} --train-iters 1 --save {tmp_path} {AUGTREE}")
    begun = cases.prepared(data, f"{GRPO} --train-iters 2 --load {tmp_path} {AUGTREE}").progress
    assert (begun.iteration, begun.consumed_groups) == (1, 2)
    cases.train(data, f"{GRPO} --train-iters 2 --load {tmp_path} {AUGTREE} --shuffle")
    assert "starting at the first group" in capsys.readouterr().out
    begun = cases.prepared(data, f"{GRPO} --train-iters 2 --load {tmp_path} {AUGTREE} --shuffle").progress
    assert (begun.iteration, begun.consumed_groups) == (1, 0)


def test_a_job_that_resumes_itself(data, tmp_path, capsys):
    flags = f"{GRPO} {AUGTREE} --save {tmp_path} --load {tmp_path} --save-interval 2"
    cases.train(data, f"{flags} --train-iters 3")
    assert "no checkpoint yet" in capsys.readouterr().out
    assert {"iter_0000002", "iter_0000003"} <= set(os.listdir(tmp_path))
    records, _ = cases.train(data, f"{flags} --train-iters 3")
    assert records == [] and "nothing to do" in capsys.readouterr().out


# --- broken and foreign checkpoints ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "owner, name, calls",
    [
        (checkpoint.os, "makedirs", 0),
        (checkpoint, "_torch_save", 0),
        (checkpoint, "save_file", 0),
        (checkpoint, "_write_text", 0),
        (checkpoint, "_sync", 0),
        (checkpoint.os, "rename", 0),
        (checkpoint.os, "rename", 1),
        (checkpoint, "_write_text", 1),
        (checkpoint.os, "replace", 0),
    ],
)
def test_a_killed_save_leaves_the_older_checkpoint(data, tmp_path, monkeypatch, owner, name, calls):
    _, trainer = cases.train(data, f"{GRPO} --train-iters 2 --save {tmp_path} --save-interval 1 {AUGTREE}")
    trainer.progress = replace(trainer.progress, iteration=1)
    trainer.save()  # the newest is iteration 1 again; a folder for iteration 2 exists
    older = cases.state_of(trainer)
    with torch.no_grad():
        next(trainer.ddp.parameters()).add_(1.0)
    trainer.progress = replace(trainer.progress, iteration=2)
    original, left = getattr(owner, name), calls

    def killed(*args, **kwargs):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killed)
        with pytest.raises(KeyboardInterrupt):
            trainer.save()
    newest = checkpoint.latest(str(tmp_path))
    assert newest.progress.iteration == 1
    again = cases.prepared(data, f"{GRPO} --train-iters 2 --load {tmp_path} {AUGTREE}")
    resumed = cases.example.Trainer(again)
    assert not cases.differing(cases.state_of(resumed), older)
    trainer.save()  # what was left behind is no obstacle
    assert checkpoint.latest(str(tmp_path)).progress.iteration == 2
    assert not [entry for entry in os.listdir(tmp_path) if "partial" in entry]


@pytest.fixture(scope="module")
def saved(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    cases.train(data, f"{GRPO} --train-iters 1 --save {folder} {AUGTREE}")
    return folder


@pytest.mark.parametrize(
    "flags, told",
    [
        ("--num-layers 3", "--num-layers 2 there, 3 here"),
        ("--hidden-size 64 --kv-channels 16", "--kv-channels 8 there, 16 here"),
        ("--dtype float32", "--dtype float64 there, float32 here"),
        ("--norm-epsilon 1e-6", "--norm-epsilon"),
        ("--optimizer adam", "--optimizer sgd there, adam here"),
    ],
)
def test_a_foreign_checkpoint_is_refused(data, saved, flags, told):
    with pytest.raises(InputError) as refused:
        cases.prepared(data, f"{GRPO} --train-iters 2 --load {saved} {AUGTREE} {flags}")
    assert told in refused.value.values and refused.value.rule and refused.value.remedy


def test_a_shard_belongs_to_a_rank(data, tmp_path):
    flags = f"{AUGTREE} --use-distributed-optimizer"
    cases.train(data, f"{flags} --train-iters 1 --save {tmp_path}")
    with pytest.raises(InputError, match="another number of ranks") as refused:
        cases.prepared(data, f"{flags} --train-iters 2 --load {tmp_path}", world=2)
    assert "1 ranks there, 2 here" in refused.value.values


DIST = "--ckpt-format torch_dist"


@pytest.mark.parametrize(
    "name, ckpt_format",
    [
        *((name, "") for name in ("model.safetensors", "optimizer.pt", "random.pt", "checkpoint.json", "")),
        *((name, DIST) for name in (".metadata", "__0_0.distcp", "metadata.json")),
    ],
)
def test_a_damaged_checkpoint_is_refused(data, tmp_path, name, ckpt_format):
    cases.train(data, f"{GRPO} --train-iters 1 --save {tmp_path} {AUGTREE} {ckpt_format}")
    victim = tmp_path / ("iter_0000001/" + name if name else checkpoint.TRACKER)
    victim.write_bytes(victim.read_bytes()[:-9])
    with pytest.raises(InputError, match="cannot be read") as refused:
        cases.prepared(data, f"{GRPO} --train-iters 2 --load {tmp_path} {AUGTREE}")
    assert refused.value.rule and refused.value.remedy


def test_a_folder_that_cannot_be_written(data, tmp_path, capfd):
    (tmp_path / "file").write_text("")
    _, trainer = cases.train(data, f"{GRPO} --train-iters 1 {AUGTREE}")
    trainer.training.args.save = str(tmp_path / "file" / "folder")
    message = refused_save(trainer, capfd)
    assert "cannot be written" in message and "--save " in message and message.count("remedy: ") == 1


@pytest.mark.parametrize("other", ["--ffn-hidden-size 128", "--num-layers 3"])
def test_tensors_are_compared_with_the_models(data, tmp_path, other):
    """A foreign torch_dist folder with this run's manifest: names and shapes are looked at."""
    flags = f"--global-batch-size 2 --train-iters 1 {AUGTREE} {DIST}"
    cases.train(data, f"{flags} --save {tmp_path}")
    manifest = tmp_path / "iter_0000001" / "checkpoint.json"
    text = json.loads(manifest.read_text())
    flag, value = other.split()
    text["made"]["model"][flag] = int(value)
    manifest.write_text(json.dumps(text))
    with pytest.raises(SystemExit):
        cases.train(data, f"{flags} --load {tmp_path} {other}")


def test_slices_need_megatrons_format(data, saved, tmp_path):
    flags = f"{GRPO} --train-iters 2 {AUGTREE} --tensor-model-parallel-size 2"
    with pytest.raises(UnsupportedError, match="use --ckpt-format torch_dist"):
        cases.prepared(data, f"{flags} --save {tmp_path}", world=2)
    with pytest.raises(UnsupportedError, match="holds whole weights"):
        cases.prepared(data, f"{flags} --load {saved}", world=2)
    cases.prepared(data, f"{flags} --save {tmp_path} {DIST}", world=2)


def test_weights_of_others_are_for_finetuning(data, saved, tmp_path):
    ours = checkpoint.latest(str(saved))
    folder = checkpoint.save_weights(
        str(tmp_path), ours.made, load_file(os.path.join(ours.folder, checkpoint.MODEL_FILE)))
    assert sorted(os.listdir(folder)) == ["checkpoint.json", "model.safetensors"]
    flags = f"{GRPO} --train-iters 2 {AUGTREE}"
    with pytest.raises(InputError, match="--finetune"):
        cases.prepared(data, f"{flags} --load {tmp_path}")
    trainers = [cases.example.Trainer(cases.prepared(data, f"{flags} --load {path} --finetune"))
                for path in (tmp_path, saved)]
    assert not cases.differing(*map(cases.state_of, trainers)) and trainers[0].progress.iteration == 0


def test_megatrons_format_on_a_full_disk(data, tmp_path, capfd):
    flags = f"--global-batch-size 2 {AUGTREE} --save {tmp_path} {DIST}"
    _, trainer = cases.train(data, f"{flags} --train-iters 1")
    trainer.progress = replace(trainer.progress, iteration=2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (48 << 10, before[1]))
    try:
        message = refused_save(trainer, capfd)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot be written" in message and "remedy: correct the path, or free some space" in message
    assert checkpoint.latest(str(tmp_path)).progress.iteration == 1
    assert sorted(os.listdir(tmp_path)) == ["iter_0000001", checkpoint.TRACKER]


@pytest.mark.parametrize("room", [1 << 10, 48 << 10])
def test_a_full_disk_is_told_and_leaves_the_older_checkpoint(data, tmp_path, capfd, room):
    """A limit of the size of files stands for the disk; torch and safetensors have errors of their own."""
    flags = f"--global-batch-size 2 {AUGTREE} --save {tmp_path}"
    _, trainer = cases.train(data, f"{flags} --train-iters 1")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "iter_0000001").iterdir()}
    assert sizes["model.safetensors"] > 48 << 10 and sizes["optimizer.pt"] > 48 << 10
    trainer.progress = replace(trainer.progress, iteration=2)
    if room > 1 << 10:  # then the optimizer's state is small enough, and the weights are not
        trainer.optimizer.state_dict = dict
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        message = refused_save(trainer, capfd)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot be written" in message and "remedy: correct the path, or free some space" in message
    assert checkpoint.latest(str(tmp_path)).progress.iteration == 1
    assert sorted(os.listdir(tmp_path)) == ["iter_0000001", checkpoint.TRACKER]


def refused_save(trainer, capfd) -> str:
    """The message with which a save ends all ranks."""
    with pytest.raises(SystemExit) as ended:
        trainer.save()
    assert ended.value.code == launch.USER_ERROR
    return capfd.readouterr().err
