"""Config: defaults, the modes, what the user set and what follows, and every input that is refused."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import math
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memscale.config import _MODE_DEFAULTS as MODE_DEFAULTS
from memscale.config import AsyncOffloadConfig, Config, ConfigFields, OptimizationMode
from memscale.errors import ConfigError, ConfigTypeError, MemScaleError

FIELD_NAMES = [field.name for field in dataclasses.fields(Config)]

VALUES = {
    "mode": st.sampled_from([*OptimizationMode, "aggressive", "Balanced", "CONSERVATIVE"]),
    "max_cpu_offload_gb": st.none() | st.floats(0, 1e6),
    "target_gpu_utilization": st.floats(0, 1, exclude_min=True),
    "warmup_steps": st.integers(0, 10),
    "verify_correctness": st.booleans(),
    "log_file": st.none() | st.just(Path("logs/run.txt")),
    "observability_port": st.none() | st.integers(0, 65535),
    "async_config": st.none() | st.builds(AsyncOffloadConfig, workers=st.integers(1, 8)),
    "memory_budget": st.none() | st.sampled_from(["auto", "6GB", "512 MiB"]) | st.integers(1024, 2**40),
    "offload_dir": st.none() | st.just("/scratch"),
    "max_disk_offload_gb": st.none() | st.integers(0, 4000),
    "gradient_accumulation_steps": st.integers(1, 64),
}
SETTINGS = st.fixed_dictionaries({}, optional={name: VALUES.get(name, st.booleans()) for name in FIELD_NAMES})


# Defaults and modes


def test_defaults():
    config = Config()
    assert dataclasses.asdict(config) == {
        "mode": OptimizationMode.BALANCED,
        "enable_checkpointing": True,
        "enable_offloading": True,
        "enable_tiling": False,
        "use_mixed_precision": False,
        "use_8bit_optimizer": False,
        "max_cpu_offload_gb": None,
        "target_gpu_utilization": 0.85,
        "force_optimize": False,
        "use_static_profiling": True,
        "use_empirical_fallback": True,
        "warmup_steps": 2,
        "enable_logging": True,
        "log_file": None,
        "observability_port": None,
        "verify_correctness": False,
        "async_offload": False,
        "async_config": None,
        "auto_policy": False,
        "memory_budget": None,
        "offload_dir": None,
        "max_disk_offload_gb": None,
        "fused_host_step": True,
        "overlap_optimizer": None,
        "gradient_accumulation_steps": 1,
    }
    assert config.explicit_fields == frozenset()


TECHNIQUES = [
    "enable_checkpointing",
    "enable_offloading",
    "enable_tiling",
    "use_mixed_precision",
    "use_8bit_optimizer",
]


@pytest.mark.parametrize(
    ("mode", "techniques"),
    [
        ("conservative", [True, False, False, False, False]),
        ("balanced", [True, True, False, False, False]),
        ("aggressive", [True, True, True, True, True]),
    ],
)
def test_a_mode_sets_the_techniques(mode, techniques):
    assert [getattr(Config(mode=mode), name) for name in TECHNIQUES] == techniques


@pytest.mark.parametrize("mode", list(OptimizationMode))
@pytest.mark.parametrize("name", TECHNIQUES)
@pytest.mark.parametrize("value", [True, False])
def test_a_field_that_is_set_wins_over_the_mode(mode, name, value):
    config = Config(**{"mode": mode, name: value})
    assert getattr(config, name) is value
    assert config.explicit_fields == {"mode", name}


@pytest.mark.parametrize("written", ["aggressive", "AGGRESSIVE", "Aggressive", " aggressive "])
def test_a_mode_by_name(written):
    assert Config(mode=written).mode is OptimizationMode.AGGRESSIVE
    assert OptimizationMode(written) is OptimizationMode.AGGRESSIVE


def test_a_mode_reads_as_its_name():
    mode = OptimizationMode.AGGRESSIVE
    assert mode == "aggressive"
    assert (str(mode), f"{mode}", json.dumps(mode)) == ("aggressive", "aggressive", '"aggressive"')


def test_an_unknown_mode_is_refused_also_outside_a_config():
    with pytest.raises(ConfigError, match="mode='fast' is not allowed: mode must be one of 'conservative'"):
        OptimizationMode("fast")
    with pytest.raises(ConfigTypeError, match="mode=3"):
        OptimizationMode(3)


@pytest.mark.parametrize("mode", list(OptimizationMode))
def test_the_defaults_pass_their_own_checks(mode):
    config = Config(mode=mode)
    assert Config(**{name: getattr(config, name) for name in FIELD_NAMES}) == config
    assert set(MODE_DEFAULTS[mode]) <= set(FIELD_NAMES)


def test_the_lists_of_fields_agree():
    assert list(ConfigFields.__annotations__) == FIELD_NAMES
    assert list(inspect.signature(Config).parameters) == FIELD_NAMES


# What the user set, through changes and copies


def with_replace(config, **changes):
    return config.replace(**changes)


REPLACERS = [with_replace]
if hasattr(copy, "replace"):  # Python 3.13
    REPLACERS.append(copy.replace)


@pytest.mark.parametrize("replace", REPLACERS)
class TestReplace:
    def test_what_was_not_set_follows_the_new_mode(self, replace):
        config = replace(Config(target_gpu_utilization=0.5), mode="aggressive")
        assert (config.enable_tiling, config.target_gpu_utilization) == (True, 0.5)
        assert config.explicit_fields == {"mode", "target_gpu_utilization"}

    def test_and_back(self, replace):
        config = replace(Config(mode="aggressive"), mode="balanced")
        assert config == Config()
        assert config.explicit_fields == {"mode"}

    def test_what_was_set_stays(self, replace):
        config = replace(Config(mode="aggressive", enable_tiling=False), mode="conservative")
        assert config.explicit_fields == {"mode", "enable_tiling"}
        assert replace(config, mode="aggressive").enable_tiling is False

    def test_setting_a_field_to_its_own_default_counts(self, replace):
        # The value alone cannot tell this from "not set".
        config = replace(Config(), enable_tiling=False, mode="aggressive")
        assert config.enable_tiling is False
        config = replace(Config(), enable_tiling=False)
        assert replace(config, mode="aggressive").enable_tiling is False

    def test_changes_are_checked(self, replace):
        with pytest.raises(ConfigError, match="warmup_steps=-1"):
            replace(Config(), warmup_steps=-1)
        with pytest.raises(ConfigTypeError, match="Did you mean 'warmup_steps'"):
            replace(Config(), warmup_step=1)


def test_dataclasses_replace_names_the_method_to_use():
    with pytest.raises(ConfigTypeError, match=r"use config\.replace\(\.\.\.\)"):
        dataclasses.replace(Config(), mode="aggressive")


@given(SETTINGS, SETTINGS)
def test_every_way_to_replace_gives_the_same(settings, changes):
    expected = Config(**{**settings, **changes})
    for replace in REPLACERS:
        config = replace(Config(**settings), **changes)
        assert config == expected
        assert config.explicit_fields == expected.explicit_fields == set(settings) | set(changes)


@given(SETTINGS)
def test_copies_and_pickles_keep_what_was_set(settings):
    config = Config(**settings)
    ways = [
        copy.copy,
        copy.deepcopy,
        lambda original: pickle.loads(pickle.dumps(original)),
        lambda original: eval(repr(original), {"Config": Config, "AsyncOffloadConfig": AsyncOffloadConfig}),
    ]
    for way in ways:
        again = way(config)
        assert again == config
        assert hash(again) == hash(config)
        assert again.explicit_fields == config.explicit_fields == set(settings)
        assert repr(again) == repr(config)


def test_repr_shows_what_was_set():
    assert repr(Config()) == "Config()"
    assert repr(Config(warmup_steps=2, mode="Aggressive")) == "Config(mode='aggressive', warmup_steps=2)"


def test_equality_is_of_the_values_that_hold():
    assert Config() == Config(mode="balanced", warmup_steps=2)
    assert hash(Config()) == hash(Config(mode="balanced", warmup_steps=2))
    assert Config() != Config(target_gpu_utilization=0.5)
    assert len({Config(), Config(mode="balanced"), Config(mode="aggressive")}) == 2


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().mode = OptimizationMode.AGGRESSIVE
    with pytest.raises(dataclasses.FrozenInstanceError):
        AsyncOffloadConfig().workers = 3


# Values as they are stored


def test_paths_are_stored_as_text():
    config = Config(log_file=Path("logs/run.txt"), offload_dir="/scratch")
    assert (config.log_file, config.offload_dir) == ("logs/run.txt", "/scratch")


def test_whole_numbers_of_gb_are_stored_as_floats():
    stored = Config(max_cpu_offload_gb=8).max_cpu_offload_gb
    assert stored == 8.0
    assert type(stored) is float


@pytest.mark.parametrize(
    ("given_budget", "stored", "size"),
    [
        (None, None, None),
        ("auto", "auto", None),
        (" AUTO ", "auto", None),
        ("6GB", "6GB", 6 * 10**9),
        (" 6 gib", "6 gib", 6 * 2**30),
        (4096, 4096, 4096),
    ],
)
def test_memory_budget(given_budget, stored, size):
    config = Config(memory_budget=given_budget)
    assert (config.memory_budget, config.memory_budget_bytes) == (stored, size)


def test_gb_are_a_billion_bytes():
    assert Config(max_cpu_offload_gb=1.5).max_cpu_offload_bytes == 1_500_000_000
    assert Config(max_disk_offload_gb=0).max_disk_offload_bytes == 0
    assert Config().max_cpu_offload_bytes is None
    assert AsyncOffloadConfig(pinned_pool_gb=0.5).pinned_pool_bytes == 500_000_000
    assert AsyncOffloadConfig().pinned_pool_bytes is None


# Inputs that are taken and refused: what the documentation says of each field, once more


def is_number(value, kinds=(int, float)):
    return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)


def is_path(value):
    if isinstance(value, Path):
        value = str(value)
    return isinstance(value, str) and value != "" and "\0" not in value and not SURROGATES.intersection(value)


def is_size(value):
    if isinstance(value, str):
        return value.strip().lower() == "auto" or value in SIZES
    return is_number(value, int) and 1024 <= value < 2**63


SURROGATES = {chr(code) for code in range(0xD800, 0xE000)}
SIZES = {"6GB", " 1.5 gib ", "512 MiB", "4_096"}
DOCUMENTED = {
    "mode": lambda value: (
        isinstance(value, str) and value.strip().lower() in ("conservative", "balanced", "aggressive")
    ),
    "max_cpu_offload_gb": lambda value: value is None or (is_number(value) and value >= 0),
    "target_gpu_utilization": lambda value: is_number(value) and 0 < value <= 1,
    "warmup_steps": lambda value: is_number(value, int) and value >= 0,
    "log_file": lambda value: value is None or is_path(value),
    "observability_port": lambda value: value is None or (is_number(value, int) and 0 <= value <= 65535),
    "auto_policy": lambda value: isinstance(value, bool),
    "async_config": lambda value: value is None or isinstance(value, AsyncOffloadConfig),
    "memory_budget": lambda value: value is None or is_size(value),
    "offload_dir": lambda value: value is None or is_path(value),
    "max_disk_offload_gb": lambda value: value is None or (is_number(value) and value >= 0),
    "overlap_optimizer": lambda value: value is None or isinstance(value, bool),
    "gradient_accumulation_steps": lambda value: is_number(value, int) and value >= 1,
}
ANYTHING = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 70000)
    | st.floats()
    | st.floats(-1, 2)
    | st.text(alphabet="aB .\0/\ud800é", max_size=4)
    | st.sampled_from(
        [*OptimizationMode, " Balanced", "fast", *sorted(SIZES), "1kb", "6", "-6GB", "6 GX", "auto"]
    )
    | st.sampled_from([AsyncOffloadConfig(), Path("logs/run.txt"), b"run.txt", {}, [1], object(), Config()])
)


@pytest.mark.parametrize("name", FIELD_NAMES)
@given(value=ANYTHING)
def test_a_field_takes_exactly_what_is_documented(name, value):
    is_documented = DOCUMENTED.get(name, lambda value: isinstance(value, bool))
    if not is_documented(value):
        with pytest.raises((ConfigError, ConfigTypeError)):
            Config(**{name: value})
        return
    config = Config(**{name: value})
    assert config.explicit_fields == {name}
    assert Config(**{name: getattr(config, name)}) == config  # what it stores is a value that it takes


BOOLEANS = [name for name in FIELD_NAMES if isinstance(getattr(Config(), name), bool)]

BAD_SETTINGS = [
    *[(name, value, ConfigTypeError, "True or False") for name in BOOLEANS for value in (1, "yes", None)],
    ("mode", "fast", ConfigError, "'conservative', 'balanced', 'aggressive'"),
    ("mode", "", ConfigError, "'conservative', 'balanced', 'aggressive'"),
    ("mode", 1, ConfigTypeError, "an OptimizationMode or one of"),
    ("mode", None, ConfigTypeError, "an OptimizationMode or one of"),
    ("max_cpu_offload_gb", -1, ConfigError, "0 for none"),
    ("max_cpu_offload_gb", math.nan, ConfigError, "a number of GB"),
    ("max_cpu_offload_gb", math.inf, ConfigError, "a number of GB"),
    ("max_cpu_offload_gb", 10**400, ConfigError, "a number of GB"),
    ("max_cpu_offload_gb", True, ConfigTypeError, "a number of GB"),
    ("max_cpu_offload_gb", "8", ConfigTypeError, "a number of GB"),
    ("max_disk_offload_gb", -0.5, ConfigError, "0 for none"),
    ("max_disk_offload_gb", math.nan, ConfigError, "a number of GB"),
    ("max_disk_offload_gb", False, ConfigTypeError, "a number of GB"),
    ("target_gpu_utilization", 0, ConfigError, "above 0 and at most 1"),
    ("target_gpu_utilization", 1.01, ConfigError, "above 0 and at most 1"),
    ("target_gpu_utilization", 85, ConfigError, "0.85 for 85%"),
    ("target_gpu_utilization", math.nan, ConfigError, "above 0 and at most 1"),
    ("target_gpu_utilization", -math.inf, ConfigError, "above 0 and at most 1"),
    ("target_gpu_utilization", True, ConfigTypeError, "above 0 and at most 1"),
    ("target_gpu_utilization", None, ConfigTypeError, "above 0 and at most 1"),
    ("warmup_steps", -1, ConfigError, "a whole number, 0 or more"),
    ("overlap_optimizer", 1, ConfigTypeError, "True or False"),
    ("verify_correctness", 1, ConfigTypeError, "True or False"),
    ("auto_policy", None, ConfigTypeError, "True or False"),
    ("warmup_steps", 2.0, ConfigTypeError, "a whole number, 0 or more"),
    ("warmup_steps", True, ConfigTypeError, "a whole number, 0 or more"),
    ("warmup_steps", "2", ConfigTypeError, "a whole number, 0 or more"),
    ("log_file", "", ConfigError, "not empty"),
    ("log_file", "a\0b", ConfigError, "without NUL"),
    ("log_file", "a\ud800", ConfigError, "lone surrogates"),
    ("log_file", 3, ConfigTypeError, "a path"),
    ("log_file", b"run.txt", ConfigTypeError, "a path"),
    ("offload_dir", "", ConfigError, "not empty"),
    ("offload_dir", "a\0b", ConfigError, "without NUL"),
    ("offload_dir", True, ConfigTypeError, "a path"),
    ("observability_port", -1, ConfigError, "from 0 (any that is free) to 65535"),
    ("observability_port", 65536, ConfigError, "from 0 (any that is free) to 65535"),
    ("observability_port", True, ConfigTypeError, "from 0 (any that is free) to 65535"),
    ("observability_port", "9090", ConfigTypeError, "from 0 (any that is free) to 65535"),
    ("async_config", {"workers": 2}, ConfigTypeError, "AsyncOffloadConfig(workers=2)"),
    ("async_config", True, ConfigTypeError, "AsyncOffloadConfig(workers=2)"),
    ("gradient_accumulation_steps", 0, ConfigError, "a whole number of batches, 1 or more"),
    ("gradient_accumulation_steps", True, ConfigTypeError, "a whole number of batches, 1 or more"),
    ("memory_budget", 0, ConfigError, '"6GB"'),
    ("memory_budget", -(6 * 10**9), ConfigError, '"6GB"'),
    ("memory_budget", 6, ConfigError, "add the unit"),
    ("memory_budget", "6", ConfigError, "add the unit"),
    ("memory_budget", "much", ConfigError, '"6GB"'),
    ("memory_budget", 6e9, ConfigTypeError, '"6GB"'),
    ("memory_budget", math.nan, ConfigTypeError, '"6GB"'),
    ("memory_budget", True, ConfigTypeError, '"6GB"'),
]


@pytest.mark.parametrize(("name", "value", "error", "allowed"), BAD_SETTINGS)
def test_settings_that_are_refused(name, value, error, allowed):
    with pytest.raises(error) as caught:
        Config(**{name: value})
    assert isinstance(caught.value, MemScaleError)
    message = str(caught.value)
    assert message.startswith(f"{name}=")
    assert repr(value)[:20] in message
    assert allowed in message


@pytest.mark.parametrize(
    ("name", "value", "error", "allowed"),
    [
        ("prefetch_depth", 0, ConfigError, "1 or more"),
        ("prefetch_depth", 1.5, ConfigTypeError, "1 or more"),
        ("prefetch_depth", True, ConfigTypeError, "1 or more"),
        ("pinned_pool_gb", 0, ConfigError, "above 0"),
        ("pinned_pool_gb", math.nan, ConfigError, "above 0"),
        ("pinned_pool_gb", "1GB", ConfigTypeError, "above 0"),
        ("workers", 0, ConfigError, "1 or more"),
        ("workers", None, ConfigTypeError, "1 or more"),
    ],
)
def test_async_settings_that_are_refused(name, value, error, allowed):
    with pytest.raises(error) as caught:
        AsyncOffloadConfig(**{name: value})
    assert str(caught.value).startswith(f"async_config.{name}={value!r}")
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    ("written", "nearest"),
    [
        ("enable_checkpoint", "enable_checkpointing"),
        ("use_8bit", "use_8bit_optimizer"),
        ("memory_buget", "memory_budget"),
        ("Mode", "mode"),
    ],
)
def test_an_unknown_field_names_the_nearest(written, nearest):
    with pytest.raises(ConfigTypeError, match=rf"has no field '{written}'\. Did you mean '{nearest}'\?"):
        Config(**{written: True})


def test_an_unknown_field_near_to_none_lists_them_all():
    with pytest.raises(ConfigTypeError, match=r"It has: mode, enable_checkpointing, .*max_disk_offload_gb"):
        Config(qqq=1)


def test_the_inside_keyword_is_not_a_way_in():
    for smuggled in (None, "mode", frozenset({"nope"})):
        with pytest.raises(ConfigTypeError, match="has no field"):
            Config(_explicit=smuggled)


def test_positional_arguments_are_refused():
    with pytest.raises(ConfigTypeError, match="keywords only, and got 'aggressive'"):
        Config("aggressive")
