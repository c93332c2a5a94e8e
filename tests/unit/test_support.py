"""The README's table of what is supported is the one that follows from tests and limits."""

from tests.support import ROOT, missing, rewritten


def test_the_readme_has_the_table():
    readme = (ROOT / "README.md").read_text()
    assert rewritten(readme) == readme, "run python -m tests.support"


def test_every_named_test_is_there():
    assert not missing()
