"""Group files: exact round trips, and every broken rule named by file, line and field."""

from __future__ import annotations

import gzip
import json
import math
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_augtree.config import InputError
from megatron_augtree.data.groups import (
    Group,
    Response,
    fingerprint,
    fold,
    parse_range,
    read_groups,
    truncate,
    write_groups,
)
from megatron_augtree.data.tokenizer import ByteTokenizer

FINITE = st.floats(allow_nan=False, allow_infinity=False)
SALTS = st.integers(-(2**63), 2**63 - 1)
REAL = sorted((Path(__file__).resolve().parents[3] / "shared" / "data").glob("*.jsonl.gz"))


@st.composite
def responses(draw) -> Response:
    tokens = tuple(draw(st.lists(st.integers(0, 2**63 - 1), max_size=4)))
    mask = tuple(draw(st.booleans()) for _ in tokens)

    def logprobs():
        if draw(st.booleans()):
            return None
        return tuple(draw(FINITE) if on else draw(FINITE | st.just(math.nan)) for on in mask)

    salt = draw(st.none() | st.tuples(*[SALTS] * len(tokens)))
    return Response(
        tokens, mask, draw(st.none() | FINITE), draw(st.none() | FINITE), logprobs(), logprobs(), salt)


@st.composite
def groups(draw) -> Group:
    prompt = tuple(draw(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4)))
    salt = draw(st.none() | st.tuples(*[SALTS] * len(prompt)))
    return Group(draw(st.text(max_size=5)), prompt, tuple(draw(st.lists(responses(), max_size=3))), salt)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("groups")


@settings(max_examples=120, deadline=None)
@given(st.lists(groups(), min_size=1, max_size=3), st.sampled_from(["a.jsonl", "a.jsonl.gz"]))
def test_round_trip_is_exact(folder, written, name):
    write_groups(folder / name, written)
    read = read_groups(folder / name)
    assert read == written  # NaN is math.nan on both sides, and the same object is equal to itself
    assert repr(read) == repr(written)  # tells -0.0 from 0.0
    assert fingerprint(read) == fingerprint(written)
    if name.endswith(".gz"):
        assert (folder / name).read_bytes()[3:8] == bytes(5)  # no file name, no time: same bytes


def lines(path: Path, *raw) -> Path:
    path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in raw))
    return path


GOOD = {"prompt": [5, 6], "responses": [{"tokens": [987654, 2], "reward": 1}]}


def with_response(**fields) -> dict:
    return {"prompt": [5, 6], "responses": [{"tokens": []}, {"tokens": [987654, 2], **fields}]}


def nan_line(field: str, value: str) -> str:
    return f'{{"prompt": [5], "responses": [{{"tokens": [7], "{field}": {value}}}]}}'


BROKEN = [
    ("{", "column 2", "not JSON"),
    ('{"prompt": [5, 6] "responses": []}', "column 19", "not JSON"),
    ("[1, 2]", "line: a list", "not an object"),
    ("null", "line: null", "not an object"),
    ('{"prompt": [1], "prompt": [2], "responses": []}', "prompt", "twice"),
    ('{"prompt": [1], "responses": [{"tokens": [], "reward": 1, "reward": 1}]}', "reward", "twice"),
    ("9" * 5000, "line", "JSON readers"),
    ("[" * 200_000, "line", "JSON readers"),
    ({"responses": []}, "prompt", "missing"),
    ({"prompt": [1]}, "responses", "missing"),
    ({"prompt": None, "responses": []}, "prompt", "missing"),
    ({"prompt": [1], "responses": [{}]}, "responses[0].tokens", "missing"),
    ({"prompt": "SECRET", "responses": [{"reward": 1}]}, "responses[0].text", "missing"),
    ({**GOOD, "promt": [1]}, "promt", "did you mean prompt?"),
    ({**GOOD, "xyzzy": [1]}, "xyzzy", "the fields are group, prompt, responses, salt"),
    (with_response(rewrad=1), "responses[1].rewrad", "did you mean reward?"),
    (with_response(old_logprob=[0, 0]), "responses[1].old_logprob", "did you mean old_logprobs?"),
    ({**GOOD, "group": 7}, "group: an integer", "wrong type"),
    ({"prompt": 5, "responses": []}, "prompt: an integer", "wrong type"),
    ({"prompt": [], "responses": []}, "prompt: 0 tokens", "prompt is empty"),
    ({"prompt": "", "responses": []}, "prompt: 0 tokens", "prompt is empty"),
    ({"prompt": [987654, True], "responses": []}, "prompt[1]: a boolean", "valid integer"),
    ({"prompt": [987654, 2.0], "responses": []}, "prompt[1]: a fraction", "valid integer"),
    ({"prompt": [-1], "responses": []}, "prompt[0]: a negative integer", "valid integer"),
    ({"prompt": [2**63], "responses": []}, "prompt[0]: an integer", "2^63-1"),
    ({"prompt": ["SECRET"], "responses": []}, "prompt[0]: a string", "valid integer"),
    ({"prompt": [1], "responses": {"tokens": [1]}}, "responses: an object", "wrong type"),
    ({"prompt": [1], "responses": [[987654]]}, "responses[0]: a list", "wrong type"),
    ({"prompt": [1], "responses": [{"tokens": [1, None]}]}, "responses[0].tokens[1]: null", "valid integer"),
    ({"prompt": [1], "responses": [{"text": "SECRET"}]}, "responses[0].text", "mixes"),
    ({"prompt": "SECRET", "responses": [{"tokens": [1]}]}, "responses[0].tokens", "mixes"),
    (with_response(text="SECRET"), "responses[1].text", "mixes"),
    ({"prompt": "SECRET", "responses": [{"text": 4}]}, "responses[0].text: an integer", "wrong type"),
    ({"prompt": "\ud800", "responses": []}, "prompt", "surrogate"),
    ({"prompt": "a", "responses": [{"text": "\udfff"}]}, "responses[0].text", "surrogate"),
    ({**GOOD, "salt": [1]}, "salt: 1 entries, prompt: 2", "differ in length"),
    ({**GOOD, "salt": [1, True]}, "salt[1]: a boolean", "valid integer"),
    ({**GOOD, "salt": [1, -(2**63) - 1]}, "salt[1]: a negative integer", "64 bits"),
    (with_response(salt=[1]), "responses[1].salt: 1 entries, tokens: 2", "differ in length"),
    (with_response(loss_mask=[1]), "responses[1].loss_mask: 1 entries, tokens: 2", "differ in length"),
    (with_response(old_logprobs=[0]), "responses[1].old_logprobs: 1 entries, tokens: 2", "differ in length"),
    (with_response(ref_logprobs=[0] * 3), "responses[1].ref_logprobs: 3 entries, tokens: 2", "differ in"),
    (with_response(loss_mask=[1, 2]), "responses[1].loss_mask[1]: an integer", "neither 0 nor 1"),
    (with_response(loss_mask=[True, 1]), "responses[1].loss_mask[0]: a boolean", "neither 0 nor 1"),
    (with_response(loss_mask=[1, 0.0]), "responses[1].loss_mask[1]: a fraction", "neither 0 nor 1"),
    (with_response(loss_mask="11"), "responses[1].loss_mask: a string", "wrong type"),
    (with_response(reward="1"), "responses[1].reward: a string", "not a finite number"),
    (with_response(reward=True), "responses[1].reward: a boolean", "not a finite number"),
    (with_response(reward=10**400), "responses[1].reward: an integer", "not a finite number"),
    (with_response(advantage=[1]), "responses[1].advantage: a list", "not a finite number"),
    (nan_line("reward", "NaN"), "responses[0].reward: a number that is", "not a finite number"),
    (nan_line("reward", "1e999"), "responses[0].reward: a number that is", "not a finite number"),
    (nan_line("advantage", "-Infinity"), "responses[0].advantage: a number that is", "not a finite number"),
    (nan_line("old_logprobs", "[-Infinity]"), "responses[0].old_logprobs[0]: a", "not a finite number"),
    (with_response(old_logprobs=3), "responses[1].old_logprobs: an integer", "wrong type"),
    (with_response(ref_logprobs=[-1, "x"]), "responses[1].ref_logprobs[1]: a string", "not a finite number"),
    (with_response(loss_mask=[0, 1], old_logprobs=[None] * 2), "responses[1].old_logprobs[1]: nan", "miss"),
    (with_response(ref_logprobs=[None, 0]), "responses[1].ref_logprobs[0]: nan", "missing"),
]


@pytest.mark.parametrize(
    "line, field, text", BROKEN, ids=[f"{i}-{case[1][:30]}" for i, case in enumerate(BROKEN)])
def test_a_broken_line_is_named_by_file_line_and_field(tmp_path, line, field, text):
    path = lines(tmp_path / "g.jsonl", GOOD, "", line)
    with pytest.raises(InputError) as caught:
        read_groups(path)
    error = caught.value
    assert error.values.startswith(f"{path}:3: {field}"), error
    assert text in str(error)
    assert error.rule and error.remedy
    assert "SECRET" not in str(error) and "987654" not in str(error)
    assert len(read_groups(path, 0, 1)) == 1  # lines beyond the range are not looked into


def test_bytes_that_are_not_utf8(tmp_path):
    path = tmp_path / "g.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"group": "\xff"}\n')
    with pytest.raises(InputError, match="not UTF-8") as caught:
        read_groups(path)
    assert caught.value.values == f"{path}:2: byte 12"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    with pytest.raises(InputError, match="name that ends in .gz"):
        read_groups(path)


def test_optional_fields_and_defaults(tmp_path):
    path = lines(tmp_path / "g.jsonl", "", GOOD, {
        "group": "b", "prompt": [1], "salt": [-9], "responses": [
            {"tokens": [], "loss_mask": None, "reward": None},
            {"tokens": [3, 4], "loss_mask": [0, 1], "reward": 2, "advantage": -0.5,
             "old_logprobs": [None, -1], "ref_logprobs": [-2.5, -3], "salt": [7, 8]}]},
        {"prompt": [1], "responses": []})
    assert read_groups(path) == [
        Group("line-2", (5, 6), (Response((987654, 2), (True, True), 1.0),)),
        Group("b", (1,), (
            Response((), ()),
            Response((3, 4), (False, True), 2.0, -0.5, (math.nan, -1.0), (-2.5, -3.0), (7, 8))), (-9,)),
        Group("line-4", (1,), ()),
    ]


def test_marks_and_line_ends_of_other_systems(tmp_path):
    path = tmp_path / "g.jsonl"
    line = json.dumps({"prompt": "a\u2028b", "responses": []}, ensure_ascii=False).encode()  # no end of line
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n  \t\r\n" + line)
    assert [group.name for group in read_groups(path)] == ["line-1", "line-4"]
    assert ByteTokenizer().decode(read_groups(path)[0].prompt) == "a\u2028b"
    path.write_bytes(b"\xef\xbb\xbf\n" + line)
    assert [group.name for group in read_groups(path)] == ["line-2"]


def test_text_groups(tmp_path):
    path = lines(tmp_path / "g.jsonl", GOOD, {"prompt": "2+2é", "responses": [
        {"text": "4", "reward": 1, "loss_mask": [1, 0]}, {"text": ""}]})
    group = read_groups(path)[1]
    assert group.prompt == (50, 43, 50, 0xC3, 0xA9)
    assert group.responses == (Response((52, 256), (True, False), 1.0), Response((256,), (True,)))
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(group.prompt) == "2+2é" and tokenizer.decode(group.responses[0].tokens) == "4"
    assert tokenizer.decode((0xFF,)) == "\ufffd"
    for bad in (257, -1):
        with pytest.raises(InputError, match="byte vocabulary") as error:
            tokenizer.decode((5, bad, bad))
        assert error.value.values == "2 of 3 ids"  # how many, never which


def test_another_tokenizer(tmp_path):
    class Letters:
        vocab_size, end_of_text = 27, 0

        def encode(self, text):
            return [ord(letter) - 96 for letter in text]

        def decode(self, tokens):
            return "".join(chr(token + 96) for token in tokens if token)

    path = lines(tmp_path / "g.jsonl", {"prompt": "ab", "responses": [{"text": "c"}]})
    group, = read_groups(path, tokenizer=Letters())
    assert group == Group("line-1", (1, 2), (Response((3, 0), (True, True)),))


def test_files_that_cannot_be_read(tmp_path):
    text = "".join(json.dumps({**GOOD, "group": str(i)}) + "\n" for i in range(4000))
    packed = gzip.compress(text.encode())
    damaged = {
        "plain.gz": json.dumps(GOOD).encode(),
        "short.gz": packed[:-9],
        "block.gz": packed[:10] + b"\x07" + packed[11:],  # a kind of block that deflate does not have
        "checksum.gz": packed[:-8] + bytes(4) + packed[-4:],
    }
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match="damaged") as caught:
            read_groups(tmp_path / name)
        assert str(tmp_path / name) in caught.value.values
    (tmp_path / "folder").mkdir()
    for name in ("missing.jsonl", "missing.jsonl.gz", "folder"):
        with pytest.raises(InputError, match="cannot be read") as caught:
            read_groups(tmp_path / name)
        assert str(tmp_path / name) in caught.value.values


def test_ranges(tmp_path):
    five = [{"group": f"g{i}", "prompt": [i], "responses": []} for i in range(5)]
    path = lines(tmp_path / "g.jsonl", *five)
    for start, stop in ((0, None), (0, 5), (1, 3), (4, None), (4, 5)):
        assert [g.name for g in read_groups(path, start, stop)] == [f"g{i}" for i in range(5)][start:stop]
    for start, stop in ((5, None), (5, 6), (9, 12), (3, 6)):
        with pytest.raises(InputError, match="too few groups") as caught:
            read_groups(path, start, stop)
        assert f"5 groups, asked for {start}:{stop or ''}" in caught.value.values
    for start, stop in ((-1, None), (-2, -1), (2, 2), (3, 1), (0, 0)):
        with pytest.raises(InputError, match="selects no group"):
            read_groups(path, start, stop)
    for content in ("", "\n \r\n"):
        path.write_text(content)
        with pytest.raises(InputError, match="0 groups, asked for 0:"):
            read_groups(path)


@pytest.mark.parametrize("text, expected", [
    ("0:1", (0, 1)), ("2:", (2, None)), (":5", (0, 5)), (":", (0, None)), (" 07:8 ", (7, 8))])
def test_parse_range(text, expected):
    assert parse_range(text) == expected


@pytest.mark.parametrize("text", [
    "", "3", "1:1", "2:1", "-1:2", "0:-1", "a:b", "1:2:3", "0.5:2", ":0", "٣:٤", "1 :2", "0:" + "9" * 19])
def test_parse_range_refuses(text):
    with pytest.raises(InputError, match="cannot read a range") as caught:
        parse_range(text, flag="--rows")
    assert f"--rows {text!r}" in caught.value.values


FULL = Group("g", (11, 12, 13), (
    Response((1, 2, 3), (True, False, True), 0.25, -1.5, (-1.0, math.nan, -2.0), (-3.0, -4.0, -5.0),
             (7, 8, 9)),
    Response((4,), (True,)), Response((), ())), (21, 22, 23))


def test_fold():
    folded = fold([FULL], 4)
    assert folded[0].prompt == (3, 0, 1) and folded[0].prompt_salt == FULL.prompt_salt
    assert [r.tokens for r in folded[0].responses] == [(1, 2, 3), (0,), ()]
    assert [replace(r, tokens=old.tokens) for r, old in zip(folded[0].responses, FULL.responses)] == list(
        FULL.responses)
    assert fold([FULL], 14) == [FULL]
    for size in (0, -3):
        with pytest.raises(InputError, match="vocabulary"):
            fold([FULL], size)


def test_truncate():
    assert truncate([FULL]) == truncate([FULL], 3, 3) == truncate([FULL], 99, 99) == [FULL]
    cut, = truncate([FULL], 2, 2)
    assert cut == Group("g", (11, 12), (
        Response((1, 2), (True, False), 0.25, -1.5, (-1.0, math.nan), (-3.0, -4.0), (7, 8)),
        Response((4,), (True,)), Response((), ())), (21, 22))
    cut, = truncate([FULL], None, 0)
    assert cut.prompt == FULL.prompt and [r.tokens for r in cut.responses] == [(), (), ()]
    assert cut.responses[0] == Response((), (), 0.25, -1.5, (), (), ())
    for limits, flag in (((0, 5), "--max-prompt-tokens 0"), ((5, -1), "--max-response-tokens -1")):
        with pytest.raises(InputError, match=flag):
            truncate([FULL], *limits)


def test_fingerprint_tells_all_that_the_update_depends_on():
    first, second, empty = FULL.responses

    def changed(**fields) -> list[Group]:
        return [replace(FULL, responses=(replace(first, **fields), second, empty))]

    variants = [
        [FULL], [], [FULL, FULL], [replace(FULL, prompt=(11, 12, 14))],
        [replace(FULL, prompt_salt=(21, 22, 24))], [replace(FULL, prompt_salt=None)],
        [replace(FULL, responses=(second, first, empty))],
        [replace(FULL, responses=(first, second))], [replace(FULL, responses=())],
        changed(tokens=(1, 2, 4)), changed(loss_mask=(True, False, False)), changed(reward=0.5),
        changed(reward=None), changed(advantage=-1.25), changed(advantage=None), changed(salt=(7, 8, 10)),
        changed(salt=None), changed(old_logprobs=(-1.0, math.nan, math.nextafter(-2.0, 0))),
        changed(old_logprobs=(-1.0, 0.0, -2.0)), changed(old_logprobs=None), changed(ref_logprobs=None),
        changed(old_logprobs=first.ref_logprobs, ref_logprobs=first.old_logprobs),
        changed(reward=first.advantage, advantage=first.reward),
        [replace(FULL, responses=(first, second, replace(empty, salt=())))],
        [replace(FULL, responses=(first, second, replace(empty, old_logprobs=())))],
    ]
    assert len({fingerprint(variant) for variant in variants}) == len(variants)
    assert fingerprint([replace(FULL, name="other")]) == fingerprint([FULL])
    other_nan, = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_1234))
    assert fingerprint(changed(old_logprobs=(-1.0, other_nan, -2.0))) == fingerprint([FULL])


def test_fingerprint_counts_responses():
    """Without their number, a response and a group could give the same bytes: here is such a pair."""
    tokens, mask = tuple(range(8)), (True,) * 8
    mask_word, = struct.unpack("<q", bytes(mask))
    tiny = 5e-324  # the float whose bits are those of the integer 1
    answered = [Group("a", (1,), (Response(tokens, mask),)), Group("b", (77, 0, 0, 0, 1, 1, 1, 1, 0), ())]
    salt = (mask_word, -1, -1, -1, -1, -1, 9, 77)
    later = Response((), (), reward=tiny, advantage=tiny, old_logprobs=(), salt=())
    assert fingerprint(answered) != fingerprint([Group("a", (1,), ()), Group("b", tokens, (later,), salt)])


def test_records_check_themselves():
    with pytest.raises(InputError, match="salt: 1 entries, prompt: 2"):
        Group("g", (1, 2), (), (3,))
    with pytest.raises(InputError, match="prompt is empty"):
        Group("g", (), ())
    for field in ("reward", "advantage"):
        for value in (math.nan, math.inf):
            with pytest.raises(InputError, match=f"{field}: {value}"):
                Response((1,), (True,), **{field: value})
    with pytest.raises(InputError, match="infinite"):
        Response((1,), (False,), ref_logprobs=(-math.inf,))


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "g.jsonl.gz"
    write_groups(path, [FULL])

    def stops():
        yield replace(FULL, name="new")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_groups(path, stops())
    assert read_groups(path) == [FULL]
    assert list(tmp_path.iterdir()) == [path]
    link = tmp_path / "link.jsonl.gz"
    link.symlink_to(path.name)
    write_groups(link, [replace(FULL, name="new")])
    assert link.is_symlink() and read_groups(path)[0].name == "new"


def test_files_that_cannot_be_written(tmp_path):
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "missing" / "g.jsonl", tmp_path / "folder"):
        with pytest.raises(InputError, match="cannot be written") as caught:
            write_groups(path, [FULL])
        assert str(path) in caught.value.values
    assert [item.name for item in tmp_path.iterdir()] == ["folder"]


def test_real_files_read_as_they_are(tmp_path):
    """The three real files where the checkout has them beside it, else one made here in their form."""
    files = REAL
    if not files:
        files = [tmp_path / "made.jsonl.gz"]
        with gzip.open(files[0], "wt") as file:
            for i in range(20):
                answers = [{"tokens": [i, 151_645], "loss_mask": [1, 0], "reward": k / 3} for k in range(4)]
                file.write(json.dumps({"group": f"m-{i}", "prompt": [9, i], "responses": answers}) + "\n")
    for path in files:
        with gzip.open(path, "rt") as file:
            expected = [json.loads(line) for line in file]
        read = read_groups(path)
        assert [(g.name, list(g.prompt)) for g in read] == [(e["group"], e["prompt"]) for e in expected]
        for group, raw in zip(read, expected, strict=True):
            for response, answer in zip(group.responses, raw["responses"], strict=True):
                assert list(response.tokens) == answer["tokens"]
                assert list(response.loss_mask) == [entry == 1 for entry in answer["loss_mask"]]
                assert response.reward == answer["reward"] and response.old_logprobs is None
        assert read_groups(path, 3, 5) == read[3:5]


def test_reading_needs_only_the_standard_library():
    code = ("import sys, megatron_augtree.data.groups; "
            "print([m for m in ('torch', 'numpy', 'megatron') if m in sys.modules])")
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
