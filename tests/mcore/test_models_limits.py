"""Every setting that AugTree refuses: from arguments and from a configuration, under every release.

A release that renames a field would let it through unnoticed. So a field of ``LIMITS`` is one that the
installed release has, or that the table below says it has not; ``scripts/test_matrix.sh`` checks every row.
"""

import dataclasses
import inspect
import os
import subprocess
from pathlib import Path

import megatron.core
import pytest
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_augtree.config import UnsupportedError
from megatron_augtree.mcore.arguments import LIMITS, check_config, check_supported
from megatron_augtree.mcore.selfcheck import TESTED
from tests.mcore.test_arguments import REFUSED_FIELDS, config, parse

#: release -> fields of LIMITS that neither its configuration nor its GPTModel has.
ABSENT: dict[str, set[str]] = {
    "0.16": {"use_mup"},
    "0.19": set(),
}
#: Fields of configurations derived from megatron-core's, and whose.
DERIVED = {"attn_logit_softcapping": "Megatron-Bridge's Gemma 2 provider"}


ROOT = Path(__file__).parents[2]


def release() -> str:
    return ".".join(megatron.core.__version__.split(".")[:2])


def test_limited_fields_exist_in_this_release(record_property):
    here = {field.name for field in dataclasses.fields(TransformerConfig)}
    here |= set(inspect.signature(GPTModel.__init__).parameters)
    limited = {limit.field for limit in LIMITS} - set(DERIVED)
    record_property(f"fields of LIMITS in megatron-core {release()}", ", ".join(sorted(limited & here)))
    assert limited - here == ABSENT[release()]


def test_no_limited_field_is_absent_everywhere():
    assert not set.intersection(*ABSENT.values())
    assert set().union(*ABSENT.values()) <= {limit.field for limit in LIMITS}


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.flag)
def test_each_limit_is_refused_with_flag_value_rule_and_remedy(limit):
    value = REFUSED_FIELDS[limit.field]
    args, built = parse(), config()
    setattr(args, limit.argument, value)
    setattr(built, limit.field, value)  # after construction: megatron-core refuses some of them itself
    for check, given, told in ((check_supported, args, f"{limit.flag} {value}"),
                               (check_config, built, f"{limit.flag} ({limit.field} = {value!r})")):
        with pytest.raises(UnsupportedError) as refused:
            check(given)
        assert refused.value.values == told
        assert refused.value.rule == limit.rule
        assert refused.value.remedy == f"{limit.flag}: {limit.remedy}"


def test_the_matrix_runs_the_first_and_the_last_release():
    """So every row of the table above is checked, and the self-check runs for no release of the matrix."""
    files = [path.stem.removeprefix("megatron-core-").split(".")
             for path in (ROOT / "requirements").glob("megatron-core-*.txt")]
    assert sorted(tuple(map(int, number[:2])) for number in files) == sorted(TESTED)
    assert sorted(ABSENT) == sorted(".".join(number[:2]) for number in files)


def test_a_release_without_requirements_is_named():
    ended = subprocess.run(["bash", "-c", ". scripts/env.sh"], cwd=ROOT, capture_output=True, text=True,
                           env={**os.environ, "AUGTREE_MEGATRON": "9.9.9"})
    assert ended.returncode == 1
    assert "AUGTREE_MEGATRON=9.9.9" in ended.stderr
    assert "requirements/megatron-core-9.9.9.txt" in ended.stderr
