"""The patches of ``megatron.training`` that call the hooks of `pretrain.py`: one table, one wrapper each.

All targets are in the training loop; megatron-core itself is not patched.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

from megatron_augtree.mcore.megatron_lm import pretrain
from megatron_augtree.mcore.patches import Patch, Registry


def _with_arguments(original: Callable) -> Callable:
    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return pretrain.add_arguments(original(parser))

    return add_megatron_arguments


def _with_checks(original: Callable) -> Callable:
    @functools.wraps(original)
    def validate_args(args: argparse.Namespace, *others: Any, **kwargs: Any) -> Any:
        pretrain.begin(args)
        result = original(args, *others, **kwargs)
        pretrain.checked(args)
        return result

    return validate_args


def _with_config(original: Callable) -> Callable:
    @functools.wraps(original)
    def core_transformer_config_from_args(args: argparse.Namespace, *others: Any, **kwargs: Any) -> Any:
        if pretrain.current() is not None:
            kept = vars(args).copy()
            pretrain.model_arguments(kept)
            args = argparse.Namespace(**kept)
        return original(args, *others, **kwargs)

    return core_transformer_config_from_args


def _with_binding(original: Callable) -> Callable:
    @functools.wraps(original)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> tuple:
        result = original(*args, **kwargs)
        pretrain.bound(result[0])
        return result

    return setup_model_and_optimizer


def _with_groups(original: Callable) -> Callable:
    @functools.wraps(original)
    def build_train_valid_test_datasets(provider: Callable, samples: tuple | None = None) -> tuple:
        if pretrain.current() is None:
            return original(provider, samples)
        # The number of samples follows from Megatron's own flags; only the provider is ours.
        return original(pretrain.datasets, samples)

    return build_train_valid_test_datasets


def _with_schedule(original: Callable) -> Callable:
    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable:
        return original(*args, **kwargs) if pretrain.current() is None else pretrain.play

    return get_forward_backward_func


_ARGUMENTS, _TRAINING = "megatron.training.arguments", "megatron.training.training"

PATCHES: tuple[Patch, ...] = (
    Patch("arguments", _ARGUMENTS, "add_megatron_arguments", "AugTree's flags are to be known",
          _with_arguments, {"": ("parser",)}),
    Patch("validation", _ARGUMENTS, "validate_args",
          "flags are checked, and the pool becomes one context-parallel group", _with_checks,
          {"": ("args", "defaults")}),
    Patch("config", _ARGUMENTS, "core_transformer_config_from_args",
          "the model is built as for one context-parallel rank", _with_config,
          {"": ("args", "config_class")}),
    Patch("binding", _TRAINING, "setup_model_and_optimizer", "the built model is bound (prepare_model)",
          _with_binding, {"0.16": ("model_provider_func", "model_type"),
                          "": ("model_type", "model_provider_func")}),
    Patch("data", _TRAINING, "build_train_valid_test_datasets", "the data are groups, planned step by step",
          _with_groups, {"": ("build_train_valid_test_datasets_provider", "train_valid_test_num_samples")}),
    Patch("schedule", _TRAINING, "get_forward_backward_func", "AugTreeSchedule plays the plan",
          _with_schedule, {"0.16": ("pp_size", "vp_size"),
                           "": ("pp_size", "vp_size", "schedule_pg_collection")}, copies=False),
)

REGISTRY = Registry(PATCHES)
