"""Replacing functions of another package: a table that says what, where and why, checked, and reversible.

Megatron-LM has no plug-in points for arguments, data or schedule, so `megatron_lm/patches.py` replaces a few
functions of ``megatron.training``. Nothing is replaced at import. `Registry.apply` checks every target
before it touches the first one: that it exists, and that its parameters are those its wrapper was written
for. It replaces the function wherever it was imported by name too, and takes everything back if anything
fails. `Registry.restore` leaves every attribute as it was, the same object. Wrappers ask at call time whether
there is anything to do, so with every patch in place and no mode chosen a run is the stock run.

The rules, each a test (`tests/mcore/test_patches.py`): applying twice is applying once; a failure half-way
leaves nothing behind; ``restore`` reaches copies that were made while a patch was in place.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.core import package_info

from megatron_augtree.config import AugTreeError, UnsupportedError

#: Releases (major.minor) whose targets and signatures the tests have seen.
TESTED = ("0.16", "0.19")
#: What a source file holds where its hooks were put in by hand (`patches/README.md`).
MARK = "megatron_augtree"

_MISSING = object()
_warned: set[str] = set()


@dataclass(frozen=True)
class Patch:
    """One replaced attribute.

    Attributes:
        name: short, unique in a registry.
        module: dotted name of the module that holds the target.
        attribute: name in the module; dotted for an attribute of a class.
        reason: why it is replaced, one clause.
        wrap: original -> replacement.
        parameters: release -> the target's first parameters, by name; the release ``""`` stands for all that
            are not listed. Empty: the target is not a Python function, or its wrapper passes everything on.
        optional: the attribute may be missing; it is added then, and taken away again.
        releases: where it is needed; empty means everywhere.
        copies: what other modules imported by name is replaced too; False leaves it to the target alone.
    """

    name: str
    module: str
    attribute: str
    reason: str
    wrap: Callable[[Any], Any]
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    optional: bool = False
    releases: tuple[str, ...] = ()
    copies: bool = True

    @property
    def target(self) -> str:
        """Dotted name of the target."""
        return f"{self.module}.{self.attribute}"

    def owner(self) -> Any:
        """The module or class whose attribute is replaced.

        Raises:
            UnsupportedError: there is no such module or class.
        """
        path, _, _ = self.attribute.rpartition(".")
        try:
            found: Any = importlib.import_module(self.module)
            for part in filter(None, path.split(".")):
                found = getattr(found, part)
        except ModuleNotFoundError as error:
            if error.name and error.name.partition(".")[0] != "megatron":
                raise UnsupportedError(
                    "a package that Megatron needs is missing",
                    values=f"{error.name}, imported by {self.module}",
                    rule="megatron.training needs more packages than megatron-core",
                    remedy=f"pip install {error.name}",
                ) from error
            raise self._misfit(f"{type(error).__name__}: {error}", "the target exists") from error
        except (ImportError, AttributeError) as error:
            raise self._misfit(f"{type(error).__name__}: {error}", "the target exists") from error
        return found

    def find(self, release: str) -> Any:
        """The target as it is now, checked unless it is there by hand; `_MISSING` where it may be, and is.

        Raises:
            UnsupportedError: it does not exist, or has other parameters than its wrapper was written for.
        """
        found = getattr(self.owner(), self.attribute.rpartition(".")[2], _MISSING)
        if found is _MISSING:
            if self.optional:
                return found
            raise self._misfit("no such attribute", "the target exists")
        expected = self.parameters.get(release, self.parameters.get("", ()))
        if expected and not self.by_hand(found):
            try:
                actual = tuple(inspect.signature(found).parameters)
            except (TypeError, ValueError) as error:
                raise self._misfit(f"{found!r} has no signature", "the target is a function") from error
            if actual[: len(expected)] != expected:
                raise self._misfit(
                    f"parameters ({', '.join(actual)})", f"its parameters begin with ({', '.join(expected)})"
                )
        return found

    def by_hand(self, target: Any) -> bool:
        """Whether the target is the plug-in's own, or its source calls the plug-in already."""
        if str(getattr(target, "__module__", "")).partition(".")[0] == MARK:
            return True
        try:
            return MARK in inspect.getsource(target)
        except (OSError, TypeError):
            return False

    def _misfit(self, found: str, rule: str) -> UnsupportedError:
        return UnsupportedError(
            "a patch does not fit the installed Megatron",
            values=f"patch {self.name}, target {self.target}, {package_info.__version__}: {found}",
            rule=f"{rule}; the patch is there because {self.reason}",
            remedy=f"use Megatron {' or '.join(TESTED)}, or put the hooks in by hand (patches/README.md)",
        )


@dataclass(frozen=True)
class Row:
    """A line of a report.

    Attributes:
        name: the patch's.
        target: dotted name.
        state: applied, not applied, by hand (the source calls the plug-in already), not needed (in this
            release) or does not fit.
        why: its reason; of one that does not fit, the error.
        copies: places beside the target that held the function by name and were replaced too.
    """

    name: str
    target: str
    state: str
    why: str
    copies: tuple[str, ...] = ()

    def __str__(self) -> str:
        also = f" (also {', '.join(self.copies)})" if self.copies else ""
        return f"{self.state:12} {self.name:22} {self.target}{also}: {self.why}"


@dataclass
class _Applied:
    patch: Patch
    owner: Any
    original: Any  # what vars(owner) held; _MISSING where nothing, or an inherited attribute
    target: Any  # what getattr gave
    replacement: Any
    copies: list[str] = field(default_factory=list)


def release() -> str:
    """Major and minor of the installed megatron-core, such as ``0.16``."""
    return ".".join(package_info.__version__.split(".")[:2])


def refuse_mindspeed() -> None:
    """Fail where MindSpeed is loaded: it replaces the same functions, by rules of its own.

    Raises:
        UnsupportedError: always, then.
    """
    found = sorted(name for name in sys.modules if name.partition(".")[0] == "mindspeed")
    if found:
        raise UnsupportedError(
            "MindSpeed and AugTree cannot patch one process",
            values=f"{found[0]} is loaded",
            rule="MindSpeed replaces arguments, attention and schedules of Megatron as well",
            remedy="remove `import mindspeed.megatron_adaptor`, or leave --context-parallel-mode out and "
            "start the script without megatron_augtree.launch",
        )


class Registry:
    """Patches, and which of them are in place.

    Args:
        patches: with different names.
    """

    def __init__(self, patches: Iterable[Patch]) -> None:
        self.patches = {patch.name: patch for patch in patches}
        self._applied: dict[str, _Applied] = {}

    def apply(self, names: Iterable[str] | None = None) -> None:
        """Puts patches in place; those that are there already, or by hand, or not needed, are left alone.

        Args:
            names: which; None means all.

        Raises:
            AugTreeError: an unknown name.
            UnsupportedError: a target is missing or has other parameters, or MindSpeed is loaded. Nothing
                has been changed then.
        """
        refuse_mindspeed()
        chosen = [self._named(name) for name in (self.patches if names is None else names)]
        version = release()
        if version not in TESTED and version not in _warned:
            _warned.add(version)
            warnings.warn(
                f"AugTree was not tested with megatron-core {package_info.__version__} (but with "
                f"{', '.join(TESTED)}): targets and signatures of its patches are checked now",
                stacklevel=2,
            )
        ready = []
        for patch in chosen:
            if patch.name in self._applied or (patch.releases and version not in patch.releases):
                continue
            target = patch.find(version)
            if not patch.by_hand(target):
                ready.append((patch, target))
        done: list[str] = []
        try:
            for patch, target in ready:
                self._applied[patch.name] = applied = _replace(patch, target)
                done.append(patch.name)
                if patch.copies:
                    applied.copies += _chase(applied.target, applied.replacement, applied.owner)
        except BaseException:
            for name in reversed(done):
                self._take_back(name)
            raise

    def restore(self) -> None:
        """Takes every patch away; every attribute is the object again that it was."""
        for name in reversed(list(self._applied)):
            self._take_back(name)

    def applied(self) -> tuple[str, ...]:
        """Names of the patches in place."""
        return tuple(self._applied)

    def report(self) -> list[Row]:
        """Every patch: whether it is in place, and why it exists. Changes nothing."""
        rows, version = [], release()
        for patch in self.patches.values():
            state, why, copies = "not applied", patch.reason, ()
            if patch.name in self._applied:
                state, copies = "applied", tuple(self._applied[patch.name].copies)
            elif patch.releases and version not in patch.releases:
                state = "not needed"
            else:
                try:
                    if patch.by_hand(patch.find(version)):
                        state = "by hand"
                except UnsupportedError as error:
                    state, why = "does not fit", error.values
            rows.append(Row(patch.name, patch.target, state, why, copies))
        return rows

    def _named(self, name: str) -> Patch:
        if name not in self.patches:
            raise AugTreeError(
                "no such patch",
                values=name,
                rule=f"a patch is one of {', '.join(self.patches)}",
                remedy="correct the name",
            )
        return self.patches[name]

    def _take_back(self, name: str) -> None:
        applied = self._applied.pop(name)
        last = applied.patch.attribute.rpartition(".")[2]
        if applied.original is _MISSING:
            delattr(applied.owner, last)
        else:
            setattr(applied.owner, last, applied.original)
        if applied.target is not _MISSING:
            # Also copies that were made from the replacement, while it was in place.
            _chase(applied.replacement, applied.target, applied.owner)


def _replace(patch: Patch, target: Any) -> _Applied:
    owner, last = patch.owner(), patch.attribute.rpartition(".")[2]
    replacement = patch.wrap(None if target is _MISSING else target)
    applied = _Applied(patch, owner, vars(owner).get(last, _MISSING), target, replacement)
    setattr(owner, last, replacement)
    return applied


def _chase(old: Any, new: Any, owner: Any) -> list[str]:
    """Replaces what modules imported by name: every module attribute that is ``old`` becomes ``new``.

    Only dictionaries are read: asking a module for an attribute may import something.

    Returns:
        dotted names of what was replaced, beside those of ``owner``.
    """
    if old is _MISSING:
        return []
    found = []
    for name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or module is owner or name.partition(".")[0] == MARK:
            continue  # what the plug-in imported is the original for it
        for attribute, value in list(vars(module).items()):
            if value is old:
                setattr(module, attribute, new)
                found.append(f"{name}.{attribute}")
    return found
