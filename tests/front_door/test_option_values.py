"""Whatever an option is given, it is taken or refused with an `OptionError`: what was given, for which option, and what
is valid. No value reaches a pass to fail there, and none fails with an error of Python's or torch's own."""

from __future__ import annotations

import math
import pickle
import re
import traceback
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fp8compile
from fp8compile import Adaptive, Cast, Delayed, Recipe, Role, StateRecipe
from fp8compile.errors import LONGEST, OptionError, shown, unknown_name
from fp8compile.formats import FORMATS, Format, Granularity
from fp8compile.option_values import READERS
from fp8compile.options import Options
from fp8compile.state_formats import names, parse_state_format

# What no option takes: wrong types, nesting, and values whose comparison is no bool.
ODD: list[Any] = [
    object(), b"x", 1j, torch.zeros(2), np.zeros(2), {"a": {"b": 1}}, [[]], [None], {None: None}, {1: 2}, (), "", "\0",
    -1, math.nan, math.inf, -math.inf, "no such value", ["no such value"], nn.Linear(2, 2), Options, lambda: None,
]  # fmt: skip

FLAG = ([None, 0, 1, "True"], "is True or False")
# Of each option: values beside those above that mean nothing, and what the error says is valid.
BAD: dict[str, tuple[list[Any], str]] = {
    "level": (["O0", "o1", "O4", 1], "Valid: O1, O2, O3"),
    "recipe": (
        [None, 3, True, "Mixed ", {"base": None}, {"base": ["mixed"]}, {"base": "rows"}, {"output": "x"}, {"out": {}}],
        "a name, a Recipe or a mapping|Valid: |a Role, None|must be",
    ),
    "select": ([None, True, ["all"], "al"], "Valid: all, profitable"),
    "operations": ([None, 3, {"linear"}, {}, [3], "linears", ["linear", "x"]], "linear, batched, convolution|Valid: "),
    "skip": ([None, 3, {"a"}, [3], [""], ["a", None]], r"takes module path patterns \(strings\)"),
    "lm_head": FLAG,
    "fold_masks": FLAG,
    "offload": FLAG,
    "one_pass_casts": FLAG,
    "keep_casts": FLAG,
    "frozen": FLAG,
    "strict": FLAG,
    "verify": FLAG,
    "chunk_loss": ([None, 0, 0.5, "on", [4096]], '"auto", True, False or a number of rows|False leaves logits whole'),
    "executor": ([None, "Eagre"], "Valid: eager, inductor"),
    "save": ([None, 8, "fp4", ["fp8"], {"": "fp8"}, {"a": None}], r"Valid: (auto, )?bf16|patterns \(strings\)"),
    "save_min_bytes": ([None, True, 1.0, "1 MiB", [1]], r"is a number of bytes \(an int from 0\)"),
    "activation_budget": ([True, 0, 1, 1.5, -0.1, "1 GiB", [0.5]], "number of bytes|lies between|A share is a float"),
    "wire": ([None, "fp16", True], "Valid: bf16, exact, fp8"),
    "kernels": ([None, "triton"], "Valid: generated, inductor"),
    "states": (
        [3, True, "int8", "log/linear", "log//", "float32/stochastic", {"first": None}, {"frist": "log"},
         {"formats": []}, {"formats": {3: "log"}}, {"formats": {"m": "e3m4"}}, {"parameters": "up"}, {"smallest": 1.5},
         {"smallest": True}],
        "Valid: |a format's name, a StateRecipe or a mapping|a number of elements|maps names|no linear form|is exact",
    ),
    "mode": (["max-autotun", True, ["default"]], "Valid: default, "),
    "captured": FLAG,
    "inductor": (
        [None, "max_autotune", ["max_autotune"], {"max_autotun": True}, {"max_autotune": "x"}, {"max_autotune": None},
         {"max_autotune": 1}, {"max_fusion_size": "8"}, {"max_fusion_size": 8.0}, {"triton": {"cudagraphs": True}},
         {"cpu_gpu_bw": "fast"}, {"custom_should_partition_ops": "aten.mm"}, {"memory_pool": "all"}, {3: True},
         {"joint_custom_pre_pass": 3}],
        "maps torch._inductor.config names|unknown setting|is True or False|is an int|is a number|a list|'none' or|or",
    ),
    "plan": ([3, True, [3], {"matmuls": []}, "missing.json", "x" * 5000, "."], "a path, a Plan|cannot be read"),
    "adaptive": (
        [True, "automatic", 3, [], {"evry": 1}, {"every": 0}, {"every": 1.5}, {"every": True}, {"minimum": "20"},
         {"minimum": math.nan}, {"minimum": math.inf}, {"margin": -1.0}, {"bf16_steps": None}, {"recompiles": 10.0}],
        '"auto" or a mapping|Valid: |is a number of dB of at least|is a whole number of at least',
    ),
    "watch": ([True, 3, ["a"]], "is a name for statistics"),
    "dump": (
        [True, 3, b"folder", "/proc/x", "/proc/self/x/y", "/dev/null/x", "/sys/x", "x" * 5000, Path("/proc")],
        "is the path of a folder|nothing can be written to",
    ),
}  # fmt: skip
# Odd to others, and fine here: None where there is a default of that name, names and paths of anything.
TAKEN: dict[str, list[str]] = {
    "level": [],
    "states": [],
    "skip": ["()", "'\\x00'", "'no such value'", "['no such value']"],
    "watch": ["'\\x00'", "'no such value'"],
    "dump": ["'no such value'"],
}


def refused(options: Any) -> str:
    """What the error says."""
    with pytest.raises(OptionError) as caught:
        Options.parse(options)
    return str(caught.value)


def parts(value: Any) -> list[Any]:
    """A value, and all that is in it."""
    inner = value.items() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()
    return [value, *(part for pair in inner for part in parts(pair))]


def test_every_option_is_in_the_table():
    assert [f.name for f in fields(Options)] == list(READERS)
    assert sorted(BAD) == sorted(READERS)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in BAD for value in BAD[name][0]], ids=str)
def test_a_bad_value_is_refused_with_the_option_the_value_and_what_is_valid(name: str, value: Any):
    message = refused({name: value})
    assert name in message
    assert any(shown(part)[:40] in message or str(part)[:40] in message for part in parts(value)), message
    assert re.search(BAD[name][1], message), message


@pytest.mark.parametrize("name", BAD)
def test_an_odd_value_is_refused_or_taken_but_never_raises_another_error(name: str):
    for value in ODD:
        if repr(value) in TAKEN.get(name, []):
            Options.parse({name: value})
        else:
            message = refused({name: value})
            assert name in message
            assert len(message) < 3 * LONGEST + 600


@pytest.mark.parametrize("value", ["mixed", "O1", ["recipe"], 3, True, [("a", "b")], Options(), nn.Linear(2, 2)])
def test_options_that_are_no_dict_are_refused(value: Any):
    message = refused(value)
    assert "options is a dict of options by name" in message
    assert shown(value) in message
    assert ("options={'recipe': 'mixed'}" in message) == (value == "mixed")


@pytest.mark.parametrize("name", [None, 3, "", "Recipe ", ("recipe",), b"recipe"])
def test_names_of_options_are_strings_that_exist(name: Any):
    assert f"unknown option {name!r}" in refused({name: "mixed"})


@pytest.mark.parametrize(
    "given",
    [
        {"save_min_bytes": 10**30, "chunk_loss": 10**30, "states": {"smallest": 10**30}, "save": {}},
        {"activation_budget": 10**30, "inductor": {}},
        {"adaptive": {"every": 10**30, "recompiles": 0, "minimum": 1e300}},
        {"skip": ["a" * 10**5], "save": "auto"},
        {"inductor": {"cpu_gpu_bw": 1, "triton.cudagraphs": True, "max_fusion_size": 8, "memory_pool": "none"}},
    ],
    ids=lambda given: " ".join(given),
)
def test_huge_and_empty_values_that_mean_something_train(given: dict[str, Any]):
    options = {"select": "all", "executor": "eager", "strict": True, **given}
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    with pytest.warns(fp8compile.Fp8Warning) if "skip" in given else torch.enable_grad():
        torch.compile(model, backend="fp8", options=options)(torch.randn(16, 32)).sum().backward()


# --- what recipes are made of


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"output": {"left": "e4m3"}}, "option 'recipe': output: left: an operand is a Cast or a mapping"),
        ({"output": {"lfet": {}}}, "unknown field of a role 'lfet'. Did you mean 'left'?"),
        ({"output": {"fast_accumulation": 1}}, "output: fast_accumulation is True or False, or None, not 1"),
        (
            {"output": {"left": {"format": ["e4m3"]}}},
            "output: left: unknown format ['e4m3']. Did you mean 'e4m3'?",
        ),
        ({"output": {"left": {"format": torch.float8_e4m3fn}}}, "Valid: e4m3, e5m2."),
        ({"output": {"left": {"granularity": "group(0)"}}}, "only group and block have a size"),
        ({"output": {"left": {"granularity": "group(99999999999999999999)"}}}, "unknown granularity"),
        ({"output": {"left": {"granularity": "group(-1)"}}}, "unknown granularity 'group(-1)'"),
        ({"output": {"left": {"granularity": 128}}}, "unknown granularity 128"),
        ({"output": {"left": {"granularity": "group(64)"}}}, "have no matmul kernel; use tensor or row"),
        ({"output": {"left": {"power_of_two": "yes"}}}, "power_of_two is True or False, not 'yes'"),
        ({"grad_input": {"left": {"delayed": 16}}}, "delayed scaling is True, None, or a mapping"),
        ({"grad_input": {"left": {"delayed": {"histroy": 1}}}}, "Did you mean 'history'?"),
        ({"grad_input": {"left": {"delayed": {"history": True}}}}, "history must be a positive integer"),
        ({"grad_input": {"left": {"delayed": {"history": 10**12}}}}, "at most 65536, not 1000000000000"),
        ({"grad_input": {"left": {"delayed": {"margin": 1000}}}}, "from -64 to 64, not 1000"),
        ({"grad_input": {"left": {"delayed": {"margin": True}}}}, "from -64 to 64, not True"),
    ],
    ids=str,
)
def test_an_error_in_a_recipe_says_where_it_is(change: Any, says: str):
    assert says in refused({"recipe": change})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Recipe(output="row"), "output is a Role or None, not 'row'"),
        (lambda: Recipe(name=3), "a recipe's name is a string, not 3"),
        (lambda: Role(left="row"), "left is a Cast, not 'row'"),
        (lambda: Role(fast_accumulation="yes"), "fast_accumulation is True or False"),
        (lambda: Cast(granularity="row"), "granularity is a Granularity, not 'row'"),
        (lambda: Cast(format="e5m2"), "format is a Format, not 'e5m2'"),
        (lambda: Cast(format=Format("e3m4", torch.float8_e4m3fn, 30.0)), "unknown format 'e3m4'. Valid: e4m3, e5m2"),
        (lambda: Cast(power_of_two=1), "power_of_two is True or False, not 1"),
        (lambda: Cast(delayed=16), "delayed is a Delayed or None, not 16"),
        (lambda: Delayed(history=0), "history must be a positive integer"),
        (lambda: Granularity("group", "128"), "its size is a number of elements, not '128'"),
        (lambda: Granularity(["row"]), "unknown granularity ['row']"),
        (lambda: Adaptive(every=0), "every is a whole number of at least 1, not 0"),
        (lambda: Adaptive(minimum="20"), "minimum is a number of dB"),
        (lambda: StateRecipe(first="log"), "first is a StateFormat, not 'log'"),
        (lambda: StateRecipe(formats=(("m", "log"),)), "m is a StateFormat, not 'log'"),
        (lambda: StateRecipe(parameters="up"), "unknown rounding of parameters 'up'"),
        (lambda: StateRecipe(smallest=None), "smallest is a number of elements, not None"),
    ],
)
def test_objects_are_checked_where_they_are_made(make: Any, says: str):
    with pytest.raises(OptionError) as caught:
        make()
    assert says in str(caught.value)


def test_an_unknown_state_format_lists_all():
    message = refused({"states": "int8"})
    assert message == f"option 'states': unknown state format 'int8'. Valid: {', '.join(sorted(names()))}."
    assert [str(parse_state_format(name)) for name in names()] == names()


def test_a_suggestion_is_near():
    assert "Did you mean" not in refused({"level": "O0"})
    assert "Did you mean 'mixed'?" in refused({"recipe": "MIXED"})
    assert "Did you mean 'e4m3'?" in str(unknown_name("format", "e4m3fn", FORMATS))


# --- what the environment says


def test_a_folder_of_the_environment_is_named_by_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(fp8compile.environment, "folder", "/proc/x")
    message = refused({})
    assert "FP8COMPILE_DUMP: nothing can be written to '/proc/x' (" in message
    assert Options.parse({"dump": tmp_path}).dump == str(tmp_path)
    assert list(tmp_path.iterdir()) == []  # where it was tried whether anything can be written


@pytest.mark.parametrize("path", [None, "", 3, "/proc/x"])
def test_a_dump_by_context_is_checked_as_the_option_is(path: Any):
    with pytest.raises(OptionError, match="dump"), fp8compile.dump(path):
        pass


# --- how they reach the user


@pytest.mark.parametrize(
    "options",
    [{"recpie": "mixed"}, "mixed", {"dump": "/proc/x"}, {"inductor": {"max_autotune": "x"}}, {"recipe": {"base": 3}}],
    ids=str,
)
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_bad_option_reaches_the_first_call_as_it_is(options: Any, fullgraph: bool):
    expected = refused(options)
    step = torch.compile(nn.Linear(4, 4), backend="fp8", options=options, fullgraph=fullgraph)
    for _ in range(2):  # nothing was compiled, so nothing was kept
        with pytest.raises(OptionError) as caught:
            step(torch.randn(4, 4))
        assert str(caught.value) == expected
    files = [Path(frame.filename) for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert not [file for file in files if file.match("_dynamo/*") and file.name != "eval_frame.py"], "frames of Dynamo"
    assert Path(__file__) == files[0]
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), OptionError)


def test_a_bad_option_of_an_optimizer_reaches_the_first_step_as_it_is():
    model = nn.Linear(4, 4)
    model(torch.randn(2, 4)).sum().backward()
    opt = torch.optim.AdamW(model.parameters())
    with pytest.raises(OptionError, match="unknown state format 'int8'"):
        torch.compile(opt.step, backend="fp8", options={"states": "int8"})()
    opt.step()


def test_a_bad_option_of_a_registered_name_is_found_at_once():
    with pytest.raises(OptionError, match="unknown recipe 'rows'"):
        fp8compile.register_backend("fp8_with_rows", recipe="rows")


def test_a_plan_that_does_not_fit_reaches_the_user_as_it_is():
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(16, 32)
    options = {"select": "all", "executor": "eager", "strict": True}
    torch.compile(model, backend="fp8", options=options)(x)
    plan = fp8compile.last_compile()
    torch.compiler.reset()
    other = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    with pytest.raises(OptionError, match="a plan of another model"):
        torch.compile(other, backend="fp8", options={**options, "plan": plan})(x)
