"""One line of a group file -> ``Group``, or an error that names file, line and field. Pure."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megatron_augtree.config import InputError
from megatron_augtree.data.records import Group, Response
from megatron_augtree.data.tokenizer import ByteTokenizer, Tokenizer

GROUP_FIELDS = ("group", "prompt", "responses", "salt")
RESPONSE_FIELDS = (
    "tokens", "text", "loss_mask", "reward", "advantage", "old_logprobs", "ref_logprobs", "salt")

#: Ids and salts end up in 64-bit tensors.
INT64_MAX = 2**63 - 1


class _RepeatedField(ValueError):
    """An object of the line has a field twice; JSON readers would silently keep the last."""


def parse_group(line: bytes, path: str, number: int, tokenizer: Tokenizer | None = None) -> Group:
    """The group on one line.

    Args:
        line: UTF-8, with or without its line end.
        path: the file's name, for messages.
        number: the line's number, from 1, for messages and for the name of a group that has none.
        tokenizer: encodes text groups; default one token a byte.

    Raises:
        InputError: any rule broken.
    """
    return _Line(path, number, tokenizer or ByteTokenizer()).group(line)


class _Line:
    """Where we are, for messages, and the readers of each part of a group."""

    def __init__(self, path: str, number: int, tokenizer: Tokenizer) -> None:
        self.path, self.number, self.tokenizer = path, number, tokenizer

    def fail(self, field: str, what: str, rule: str, remedy: str, found: str = "") -> NoReturn:
        values = f"{self.path}:{self.number}: {field}" + (f": {found}" if found else "")
        raise InputError(what, values=values, rule=rule, remedy=remedy) from None

    def checked(self, prefix: str, make: Callable[[], Any]) -> Any:
        """``make()``, with this line and ``prefix`` put before the field that a record's own check names."""
        try:
            return make()
        except InputError as error:
            self.fail(prefix + error.values, error.what, error.rule, error.remedy)

    def group(self, line: bytes) -> Group:
        raw = self.json_object(line)
        self.check_fields("", raw, GROUP_FIELDS, required=("prompt", "responses"))
        name = raw.get("group")
        if name is None:
            name = f"line-{self.number}"
        elif not isinstance(name, str):
            self.fail("group", "a field has the wrong type", "a group's name is a string",
                      "put the name in quotes", _kind(name))
        if not isinstance(raw["responses"], list):
            self.fail("responses", "a field has the wrong type", "responses is a list of objects",
                      "put the responses in [ ]", _kind(raw["responses"]))
        text = isinstance(raw["prompt"], str)
        prompt = self.encode("prompt", raw["prompt"]) if text else self.ids("prompt", raw["prompt"])
        salt = self.salt("salt", raw.get("salt"))
        responses = tuple(
            self.response(f"responses[{index}]", item, text) for index, item in enumerate(raw["responses"]))
        return self.checked("", lambda: Group(name, prompt, responses, salt))

    def json_object(self, line: bytes) -> dict[str, Any]:
        rule = "a line is one JSON object, {...}, in UTF-8"
        try:
            raw = json.loads(line.decode("utf-8"), object_pairs_hook=_object)
        except UnicodeDecodeError as error:
            gzipped = self.number == 1 and line.startswith(b"\x1f\x8b")
            self.fail(f"byte {error.start + 1}", "a line is not UTF-8", rule,
                      "give a gzip file a name that ends in .gz" if gzipped else "save the file as UTF-8")
        except json.JSONDecodeError as error:
            self.fail(f"column {error.colno}", f"a line is not JSON: {error.msg}", rule, "correct the line")
        except _RepeatedField as error:
            self.fail(str(error), "a field is given twice", "each field is given once", "remove one")
        except (ValueError, RecursionError):  # a number of thousands of digits, or thousands of open brackets
            self.fail("line", "a line is beyond what JSON readers take", rule, "correct the line")
        if not isinstance(raw, dict):
            self.fail("line", "a line is not an object", rule, "put a group on each line", _kind(raw))
        return raw

    def check_fields(
        self, prefix: str, raw: dict[str, Any], known: Sequence[str], required: Sequence[str]
    ) -> None:
        for field in raw:
            if field not in known:
                near = difflib.get_close_matches(field, known, n=1)
                self.fail(f"{prefix}{field[:40]}", "unknown field", f"the fields are {', '.join(known)}",
                          f"did you mean {near[0]}?" if near else "remove the field")
        for field in required:
            if raw.get(field) is None:
                self.fail(f"{prefix}{field}", "a field is missing", f"{', '.join(required)} must be given",
                          "add the field")

    def response(self, where: str, raw: Any, text: bool) -> Response:
        if not isinstance(raw, dict):
            self.fail(where, "a field has the wrong type", "a response is an object, {...}",
                      'write {"tokens": [...]} or {"text": "..."}', _kind(raw))
        source, other = ("text", "tokens") if text else ("tokens", "text")
        if raw.get(other) is not None:
            self.fail(f"{where}.{other}", "a group mixes text and tokens",
                      f"where the prompt is {'text' if text else 'tokens'}, so are the responses",
                      f"give {source} instead of {other}")
        self.check_fields(f"{where}.", raw, RESPONSE_FIELDS, required=(source,))
        if not text:
            tokens = self.ids(f"{where}.tokens", raw["tokens"])
        elif isinstance(raw["text"], str):
            tokens = (*self.encode(f"{where}.text", raw["text"]), self.tokenizer.end_of_text)
        else:
            self.fail(f"{where}.text", "a field has the wrong type", "text is a string",
                      "put the text in quotes", _kind(raw["text"]))
        mask = raw.get("loss_mask")
        mask = (True,) * len(tokens) if mask is None else self.mask(f"{where}.loss_mask", mask)
        reward, advantage = (
            None if raw.get(field) is None else self.number_at(f"{where}.{field}", raw[field])
            for field in ("reward", "advantage"))
        old, ref = (
            self.logprobs(f"{where}.{field}", raw.get(field)) for field in ("old_logprobs", "ref_logprobs"))
        salt = self.salt(f"{where}.salt", raw.get("salt"))
        return self.checked(f"{where}.", lambda: Response(tokens, mask, reward, advantage, old, ref, salt))

    def encode(self, field: str, text: str) -> tuple[int, ...]:
        try:
            return self.checked(f"{field}: ", lambda: tuple(self.tokenizer.encode(text)))
        except UnicodeEncodeError:
            self.fail(field, "text holds half a surrogate pair", "text is Unicode that UTF-8 can express",
                      r"remove the lone \ud800 to \udfff")

    def list_at(self, field: str, raw: Any, rule: str) -> list[Any]:
        if not isinstance(raw, list):
            self.fail(field, "a field has the wrong type", rule, "put the values in [ ]", _kind(raw))
        return raw

    def ids(self, field: str, raw: Any) -> tuple[int, ...]:
        return self.integers(field, raw, 0, "token ids are integers from 0 to 2^63-1")

    def salt(self, field: str, raw: Any) -> tuple[int, ...] | None:
        if raw is None:
            return None
        return self.integers(field, raw, -INT64_MAX - 1, "salts are integers of 64 bits")

    def integers(self, field: str, raw: Any, low: int, rule: str) -> tuple[int, ...]:
        for index, value in enumerate(self.list_at(field, raw, f"a list; {rule}")):
            if type(value) is not int or not low <= value <= INT64_MAX:  # type(): True is an int, too
                self.fail(f"{field}[{index}]", "a value is not a valid integer", rule, "correct the value",
                          _kind(value))
        return tuple(raw)

    def mask(self, field: str, raw: Any) -> tuple[bool, ...]:
        rule = "loss_mask is a list of 0 and 1"
        for index, value in enumerate(self.list_at(field, raw, rule)):
            if type(value) is not int or value not in (0, 1):
                self.fail(f"{field}[{index}]", "a value is neither 0 nor 1", rule, "correct the value",
                          _kind(value))
        return tuple(value == 1 for value in raw)

    def logprobs(self, field: str, raw: Any) -> tuple[float, ...] | None:
        if raw is None:
            return None
        values = self.list_at(field, raw, "log-probs are a list of numbers, null where the token has no loss")
        # math.nan itself, not a new NaN: tuples that hold the same object compare equal
        return tuple(
            math.nan if value is None else self.number_at(f"{field}[{index}]", value)
            for index, value in enumerate(values))

    def number_at(self, field: str, value: Any) -> float:
        """A finite float."""
        if type(value) in (int, float):
            try:
                if math.isfinite(value):
                    return float(value)
            except OverflowError:  # an integer beyond the largest float
                pass
        self.fail(field, "a value is not a finite number", "a finite number, without quotes",
                  "correct the value", _kind(value))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _RepeatedField(key[:40])
        found[key] = value
    return found


def _kind(value: Any) -> str:
    """What a value is, without showing token ids or text."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int):
        return "a negative integer" if value < 0 else "an integer"
    if isinstance(value, float):
        return "a fraction" if math.isfinite(value) else "a number that is not finite"
    return {str: "a string", list: "a list", dict: "an object"}[type(value)]
