"""The command line around its commands: what it needs, errors, output, models, and what is frozen."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_augtree.config import MODES
from megatron_augtree.tools import cli
from megatron_augtree.tools.cli import output
from megatron_augtree.tools.models import MODELS, model_shape
from tests.tools.calling import MACHINE, STEP, answer, call, refused, said

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOT = Path(__file__).with_name("command_line.txt")

# ---- with nothing else installed

HIDE = """
import importlib.metadata, sys
HIDDEN = {hidden!r}
sys.modules.update(dict.fromkeys(HIDDEN))  # None: as if it were not installed
installed = importlib.metadata.version
def version(name):
    if name in ("torch", "megatron-core", "rich", "matplotlib"):
        raise importlib.metadata.PackageNotFoundError(name)
    return installed(name)
importlib.metadata.version = version
from megatron_augtree.tools.cli import main
code = main({argv!r})
assert not any(sys.modules[name] for name in HIDDEN)
sys.exit(code)
"""


def bare(line: str, hidden=("torch", "megatron", "rich", "matplotlib", "pybind11")):
    """A command in a process where only numpy can be imported."""
    script = HIDE.format(hidden=tuple(hidden), argv=line.split())
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("line", [
    f"plan {STEP} --json", f"explain {STEP} --json", f"where {STEP} --sequence 1 --token 3 --json",
    f"estimate {STEP} --json"])  # fmt: skip
def test_only_numpy_is_needed(line):
    done = bare(line)
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict) and said(done.stderr) == ""


def test_the_demo_needs_nothing_else():
    done = bare("plan --demo")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 groups, 16 responses on 8 ranks (h100)")
    assert "fused" in done.stdout or "prefill" in done.stdout


def test_the_module_and_the_package_import_no_torch():
    script = (f"import sys, runpy; sys.argv = ['augtree', 'plan', *{STEP.split()!r}]\n"
              "import megatron_augtree\n"
              "try: runpy.run_module('megatron_augtree', run_name='__main__')\n"
              "except SystemExit as end: assert end.code == 0\n"
              "assert not {'torch', 'megatron', 'matplotlib'} & sys.modules.keys()")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 groups, 5 responses" in done.stdout


def test_doctor_says_what_is_missing():
    done = bare("doctor --megatron --json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    states = {line["about"]: line["state"] for line in data["lines"]}
    for about in ("torch", "megatron-core", "attention kernel", "patches", "parity", "bound model"):
        assert states[about] == "missing"
    assert states["rich"] == states["matplotlib"] == "absent" and states["numpy"] == "ok"
    assert data["verdict"] == "something is missing: see what to do"


def test_what_needs_more_says_so():
    for line, part in ((f"plan {STEP} --png x.png", "pip install matplotlib"),
                       ("calibrate --out x.json", "no package torch, megatron")):
        done = bare(line)
        assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr, done.stderr
        assert part in done.stderr and "  remedy: " in done.stderr


# ---- errors


@pytest.mark.parametrize(("line", "part"), [
    ("plan", "which groups?"),
    ("plan --demo --preset rag", "--preset and --demo"),
    ("plan --prompt 30", "--prompt alone"),
    ("plan --responses 30", "--responses alone"),
    ("plan --prompt \u0663 --responses 5", "is not a positive integer"),
    ("plan --group \u0663:5", "cannot read a group"),
    ("plan --prompt 30 --responses 5,x", "cannot read response lengths"),
    ("plan --prompt 30 --responses 5x9999999", "cannot read response lengths"),
    ("plan --prompt 0 --responses 5", "'0' is not a positive integer"),
    ("plan --group 30", "--group 30\n"),
    ("plan --group 0:5", "a length is out of range"),
    ("plan --groups nowhere.jsonl", "nowhere.jsonl"),
    ("plan --preset rog", "invalid choice"),
    ("plan --demo --ranks 0", "flags and values are as --help lists them"),
    ("plan --demo --model gpt-9", "--help lists all 7"),
    ("plan --demo --model qwen2", "did you mean qwen2.5-0.5b or qwen2.5-1.5b or qwen2.5-7b?"),
    ("plan --demo --dtype fp16", "it is one of bfloat16, float32, float64"),
    ("plan --demo --ranks 100000", "a pool has at most 16,384 ranks"),
    ("plan --preset rag --num-groups 65537", "a step has at most 65,536 groups"),
    ("plan --demo --num-groups 8", "it belongs to --preset"),
    ("plan --demo --range 0:1", "it belongs to --groups"),
    ("plan --group 30:5 --seed 1", "it belongs to --preset"),
    ("plan --demo --force chunks=257", "chunks is at most 256"),
    ("plan --group 30:5,6 --force chunks=30", "--force chunks=30, 29 prompt rows"),
    ("plan --group 30:5,6 --force waves=3", "force at most waves=2"),
    ("plan --demo --force degre=2", "did you mean degree?"),
    ("plan --demo --mode ring --force degree=2", "only augtree's plans can be forced"),
    ("--demo", "no command before --demo"),
    ("plan --demo --model nowhere.json", "nowhere.json"),
    ("plan --demo --tp 3", "--tp 3"),
    ("plan --demo --cluster h1000", "h100"),
    ("plan --demo --cluster nowhere.json", "nowhere.json"),
    ("plan --demo --mode rign", "invalid choice"),
    ("plan --demo --force degree", "cannot read a forced plan"),
    ("plan --demo --memory-budget-gib -1", "out of range"),
    ("plan --demo --memory-budget-gib nan", "out of range"),
    ("plan --demo --reponses 3", "did you mean --responses?"),
    ("plan --demo --rank 3", "did you mean --ranks?"),
    ("paln --demo", "did you mean plan?"),
    (f"plan {STEP} --out nowhere/plan.json", "--out nowhere/plan.json"),
    (f"plan {STEP} --trace nowhere/t.json", "--trace nowhere/t.json"),
    (f"plan {STEP} --png nowhere/p.png", "--png nowhere/p.png"),
    (f"plan {STEP} --png p.foo", "a picture cannot be written"),
    (f"plan {STEP} --mode ring --context-parallel-size 3", "divides the number of ranks"),
    ("trace nowhere.json --out x.json", "nowhere.json"),
])  # fmt: skip
def test_bad_input_is_told_in_four_parts(capsys, line, part):
    error = refused(capsys, line)
    assert part in error
    assert sum(f" {mode}" in error for mode in MODES) <= 3  # the nearest, not all


def test_errors_name_the_flags_as_they_are_given_here(capsys):
    for flag in ("--force x", "--memory-budget-gib nan", "--cluster h1000"):
        error = refused(capsys, f"plan --demo {flag}")
        assert f"values: {flag.split()[0]} " in error and "--augtree" not in error
    refusal = refused(capsys, f"plan {STEP} --mode ring --context-parallel-size 2 --memory-budget-gib -1")
    assert "--context-parallel-mode" not in refusal


def test_passes_up_to_the_rows_and_responses_may_be_forced(capsys):
    data = answer(capsys, f"plan --group 9:5,6 {MACHINE} --force chunks=8,waves=2")
    assert [p["kind"] for p in data["passes"]] == ["chunk"] * 8 + ["replay"] * 2


@pytest.mark.parametrize("text", ["", "[1", "[" * 100_000, "[]", "NaN", '{"traceEvents": [3]}',
                                  '{"traceEvents": [{"pid": [1]}]}'])  # fmt: skip
def test_files_that_are_something_else_are_told(capsys, tmp_path, text):
    path = tmp_path / "odd.json"
    path.write_text(text)
    for line in (f"plan {STEP} --model {path}", f"plan {STEP} --cluster {path}",
                 f"trace {path} --out {tmp_path}/both.json"):
        assert str(path) in refused(capsys, line)


def test_without_a_command_there_is_help(capsys):
    text = call(capsys, "")
    assert all(name in text for name in cli.COMMANDS)


def test_a_reader_that_leaves_is_no_error():
    done = subprocess.run(f"{sys.executable} -m megatron_augtree explain {STEP} --json | head -c 10",
                          shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and said(done.stderr) == "" and len(done.stdout) == 10


# ---- output


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


TABLE = output.Answer({"a": 1}, ["some [bold]text", output.Table(
    ("name", "rows"), [("x[red]y", "12"), ("z", "3")], "a title", frozenset(("rows",)))])


def test_tables_are_aligned_text_where_there_is_no_terminal():
    stream = io.StringIO()
    output.show(TABLE, stream, as_json=False)
    assert stream.getvalue() == "some [bold]text\na title\nname     rows\nx[red]y    12\nz           3\n"
    stream = io.StringIO()
    output.show(TABLE, stream, as_json=True)
    assert json.loads(stream.getvalue()) == {"a": 1}


def test_tables_are_richs_on_a_terminal_and_text_without_rich(monkeypatch):
    plain, rich, bare_terminal = io.StringIO(), Terminal(), Terminal()
    output.show(TABLE, plain, as_json=False)
    output.show(TABLE, rich, as_json=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    output.show(TABLE, bare_terminal, as_json=False)
    assert bare_terminal.getvalue() == plain.getvalue()
    assert "\x1b[" in rich.getvalue() and "─" in rich.getvalue()
    # what looks like rich's markup is text
    assert "some [bold]text" in rich.getvalue() and "x[red]y" in rich.getvalue()


@pytest.mark.parametrize(("value", "text"), [
    (2.0, "2.00 s"), (0.0123, "12.3 ms"), (0.00042, "420 us"), (0, "0 us")])
def test_seconds_in_words(value, text):
    assert output.seconds(value) == text


def test_plurals():
    assert [output.several(n, w) for n, w in ((1, "group"), (2, "pass"), (1200, "row"))] == [
        "1 group", "2 passes", "1,200 rows"]


# ---- models


def test_models_are_what_their_configurations_say(tmp_path):
    config = {"num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28,
              "intermediate_size": 18944, "num_key_value_heads": 4, "vocab_size": 152064}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert model_shape(str(path)) == model_shape("qwen2.5-7b")
    for model in MODELS.values():
        assert model.heads % model.kv_heads == 0 and model.head_dim in (64, 128)
    #: Parameters in billions, embedding and head counted once each where they are not tied.
    for name, billions in (("qwen2.5-7b", 7.6), ("llama-3.1-8b", 8.0), ("llama-3.1-70b", 70.6),
                           ("qwen2.5-32b", 32.8)):
        shape = model_shape(name)
        count = shape.layers * shape.linear_flops / 2 + 2 * shape.vocab * shape.hidden
        assert count / 1e9 == pytest.approx(billions, rel=0.01)
    for name, billions in (("qwen2.5-0.5b", 0.494), ("qwen2.5-1.5b", 1.54), ("smollm2-135m", 0.1345)):  # tied
        shape = model_shape(name)
        count = shape.layers * shape.linear_flops / 2 + shape.vocab * shape.hidden
        assert count / 1e9 == pytest.approx(billions, rel=0.01)
    with pytest.raises(Exception, match="sizes are positive"):
        path.write_text(json.dumps({**config, "vocab_size": -1}))
        model_shape(str(path))


def test_tensor_parallel_ranks_share_a_layer():
    whole, half, eighth = (model_shape("qwen2.5-7b", tp=n) for n in (1, 2, 4))
    assert half.linear_flops * 2 == whole.linear_flops and half.kv_bytes * 2 == whole.kv_bytes
    assert (eighth.kv_heads, eighth.row_parts, eighth.vocab) == (1, 4, 38016)
    assert model_shape("qwen2.5-0.5b", tp=2).kv_heads == 1
    assert model_shape("smollm2-135m", recomputed=True).recomputed == 30


# ---- the command line is frozen


def described() -> str:
    """Every flag of every command: name, what it takes, its default."""
    lines = []
    (commands,) = (a for a in cli.parser()._actions if a.dest == "command")
    for name, command in commands.choices.items():
        lines.append(name)
        for action in command._actions:
            flag = action.option_strings[-1] if action.option_strings else action.dest
            takes = "" if action.nargs == 0 else f" {action.metavar or ','.join(action.choices or ())}"
            default = "" if not action.default or action.default == "==SUPPRESS==" else f" = {action.default}"
            lines.append(f"  {flag}{takes}{default}{' (required)' if action.required else ''}")
    return "\n".join(lines) + "\n"


def test_the_command_line_is_frozen():
    assert described() == SNAPSHOT.read_text(), f"if you meant it: python {Path(__file__).name} writes it"


def test_every_command_helps_with_examples_that_parse(capsys):
    for name, module in cli.COMMANDS.items():
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--help"])
        text = capsys.readouterr().out
        assert ended.value.code == 0 and "examples:" in text and module.HELP in text
        examples = [line.split()[1:] for line in module.EXAMPLES.splitlines() if " augtree " in line]
        assert examples
        for example in examples:
            assert cli.parser().parse_args(example).command in cli.COMMANDS


def test_the_readme_says_what_the_commands_say(capsys):
    """Its command lines parse, and its table of estimates is what `estimate` answers."""
    readme = (ROOT / "README.md").read_text()
    part = readme[readme.index("## Command line") : readme.index("## Modes")]
    lines = [line.partition("#")[0].split()[1:] for line in part.splitlines() if line.startswith("augtree ")]
    assert {line[0] for line in lines} == set(cli.COMMANDS)
    for line in lines:
        cli.parser().parse_args(line)
    rows = re.findall(r"^\| `(--prompt .*?)` \| (.*?) \| (.*?) \| (.*?) \|$", part, re.MULTILINE)
    assert len(rows) == 3
    for lengths, *told in rows:
        data = answer(capsys, f"estimate {lengths} --model qwen2.5-7b")
        assert told == [f"{data[name]:.2f}" for name in ("linear_ratio", "attention_ratio", "compute_ratio")]


def test_every_flag_has_help():
    (commands,) = (a for a in cli.parser()._actions if a.dest == "command")
    assert all(action.help for command in commands.choices.values() for action in command._actions)
    assert all("--json" in command._option_string_actions for command in commands.choices.values())


def test_the_entry_point_is_the_modules():
    assert 'augtree = "megatron_augtree.tools.cli:main"' in (ROOT / "pyproject.toml").read_text()


if __name__ == "__main__":
    SNAPSHOT.write_text(described())
