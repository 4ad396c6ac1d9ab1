"""Options: each means what it says, each mistake names its cure, and what was left undone is said loudly."""

from __future__ import annotations

import warnings

import pytest
import torch
from pipelines import add_pass
from torch import nn

import fp8compile
from fp8compile.errors import Fp8Warning, OptionError
from fp8compile.options import Options
from fp8compile.passes.core.stages import Stage
from fp8compile.plan import store
from fp8compile.recipe import RECIPES

EAGER = {"select": "all", "executor": "eager", "strict": True}


@pytest.fixture(autouse=True)
def _forget_plans():
    store.reset()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.ModuleDict({"q": nn.Linear(32, 32), "out": nn.Linear(32, 32)})
        self.mlp = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))

    def forward(self, x):
        x = x + self.attn["out"](self.attn["q"](x).relu())
        return x + self.mlp(x)


def step(options, model: nn.Module | None = None, width: int = 32) -> fp8compile.Plan:
    """One compiled forward and backward of `model`; its plan."""
    model = model or nn.Sequential(Block(), Block())
    torch.compile(model, backend="fp8", options=options)(torch.randn(16, width)).sum().backward()
    return fp8compile.last_compile().plans[-1]


# --- parsing


def test_the_defaults():
    parsed = Options.parse(None)
    assert parsed == Options()
    assert parsed.recipe is RECIPES["mixed"]
    assert (parsed.select, parsed.executor, parsed.skip, parsed.lm_head) == ("profitable", "inductor", (), False)
    assert (parsed.strict, parsed.verify, parsed.mode) == (False, True, None)


def test_options_are_parsed_into_their_types():
    parsed = Options.parse(
        {"recipe": "rowwise", "skip": "lm_head", "inductor": {"max_fusion_size": 2, "debug": True}, "select": "all"},
        mode="max-autotune",
    )
    assert parsed.recipe is RECIPES["rowwise"]
    assert parsed.skip == ("lm_head",)
    assert parsed.inductor == (("debug", True), ("max_fusion_size", 2))
    assert parsed.mode == "max-autotune"
    assert Options.parse({"skip": ["a", "b"]}).skip == ("a", "b")
    hash(parsed)  # it enters cache keys


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"recpie": "mixed"},
            r"unknown option 'recpie'\. Did you mean 'recipe'\? Valid: activation_budget, adaptive, captured,",
        ),
        ({"selct": "all"}, r"unknown option 'selct'\. Did you mean 'select'\?"),
        ({"schedule": "auto"}, "option 'schedule' is called 'adaptive'"),
        ({"zzz": 1}, r"unknown option 'zzz'\. Valid: "),
        ({"recipe": "tensorwize"}, r"unknown recipe 'tensorwize'\. Did you mean 'tensorwise'\?"),
        ({"select": "al"}, r"option 'select': unknown value 'al'\. Did you mean 'all'\? Valid: all, profitable\."),
        ({"select": True}, r"option 'select': unknown value True\. Valid: all, profitable\."),
        (
            {"executor": "eagre"},
            r"option 'executor': unknown value 'eagre'\. Did you mean 'eager'\? Valid: eager, inductor\.",
        ),
        ({"lm_head": "yes"}, "option 'lm_head' is True or False, not 'yes'"),
        ({"chunk_loss": "on"}, "option 'chunk_loss' is \"auto\", True, False or a number of rows, not 'on'"),
        ({"chunk_loss": 0.5}, "option 'chunk_loss' is \"auto\", True, False or a number of rows, not 0.5"),
        ({"chunk_loss": 0}, "option 'chunk_loss': chunks of 0 rows\\? False leaves logits whole"),
        ({"strict": 1}, "option 'strict' is True or False, not 1"),
        ({"verify": None}, "option 'verify' is True or False, not None"),
        ({"skip": [3]}, r"option 'skip' takes module path patterns \(strings\), not 3"),
        ({"skip": [""]}, r"option 'skip' takes module path patterns \(strings\), not ''"),
        ({"skip": ""}, r"option 'skip' takes module path patterns \(strings\), not ''"),
        ({"skip": 3}, "skip"),
        ({"inductor": "max_autotune"}, "inductor"),
        (
            {"inductor": {"max_autotun": True}},
            r"unknown setting of torch._inductor.config .*Did you mean 'max_autotune'\?$",
        ),
        ({"recipe": {"base": ["mixed"]}}, "recipe must be a name"),
        ({"mode": "max-autotun"}, "max-autotune"),
    ],
    ids=str,
)
def test_a_bad_option_names_the_option_and_its_cure(options, message):
    with pytest.raises(OptionError, match=message):
        Options.parse(options)


def test_a_bad_option_reaches_the_user_of_torch_compile():
    with pytest.raises(OptionError, match=r"unknown option 'recpie'\. Did you mean 'recipe'\?"):
        step({**EAGER, "recpie": "mixed"}, Block())


def test_a_recipe_of_the_options_reaches_the_plan():
    plan = step({**EAGER, "recipe": {"base": "rowwise", "grad_weight": None}}, Block())
    assert plan.recipe == "rowwise*"
    assert {m.decision for m in plan.matmuls if m.role == "grad_weight"} == {"bf16"}
    assert {str(m.left) for m in plan.converted} == {"e4m3 row"}
    assert plan.reasons() == {"recipe 'rowwise*' keeps grad_weight in BF16": 4}


# --- skip


@pytest.mark.parametrize(
    ("pattern", "skipped", "kept"),
    [
        ("layers.0.q", ["layers.0.q", "model.layers.0.q", "layers.0.q.base"], ["layers.0.qk", "layers.10.q", "q"]),
        ("layers.0", ["layers.0.q", "model.layers.0.mlp.up"], ["layers.01.q", "layers.00", "my_layers.0"]),
        ("q", ["q", "layers.0.q", "q.base"], ["layers.0.qkv", "eq", "eq.x"]),
        ("layers.*.q", ["layers.0.q", "layers.31.q", "layers.a.b.q"], ["layers.0.k", "layers.q"]),
        ("*_proj", ["q_proj", "layers.0.up_proj", "layers.0.up_proj.base"], ["proj", "layers.0.mlp"]),
        ("layers.[01]", ["layers.0.q", "layers.1"], ["layers.2.q", "layers.11.q"]),
        ("Q", [], ["q", "layers.0.q"]),
    ],
)
def test_a_skip_pattern_is_a_path_a_run_of_components_or_a_glob(pattern, skipped, kept):
    options = Options.parse({"skip": ["other", pattern]})
    assert [p for p in skipped if options.skips(p) != pattern] == []
    assert [p for p in kept if options.skips(p) is not None] == []


def test_the_first_pattern_that_matches_is_named():
    assert Options.parse({"skip": ["b", "*.a", "a"]}).skips("x.a") == "*.a"


def test_skipped_matmuls_stay_in_all_three_roles():
    plan = step({**EAGER, "skip": ["mlp", "0.attn.q"]})
    rows = {m.path: {m2.decision for m2 in plan.matmuls if m2.path == m.path} for m in plan.matmuls}
    assert rows == {
        "0.attn.q": {"bf16"},
        "1.attn.q": {"fp8"},
        "0.attn.out": {"fp8"},
        "1.attn.out": {"fp8"},
        "0.mlp.0": {"bf16"},
        "0.mlp.2": {"bf16"},
        "1.mlp.0": {"bf16"},
        "1.mlp.2": {"bf16"},
    }
    # the first linear of all has no grad_input: its input asks for none
    assert plan.reasons() == {"skip='mlp'": 12, "skip='0.attn.q'": 2}


def test_a_skip_pattern_that_matches_nothing_warns_with_the_paths():
    with pytest.warns(Fp8Warning) as caught:
        step({**EAGER, "skip": ["mpl", "attn"]})
    assert [str(w.message) for w in caught if w.category is Fp8Warning] == [
        "fp8: skip pattern 'mpl' matches no matmul of this graph. "
        "Paths here: 0.attn.out, 0.attn.q, 0.mlp.0, 0.mlp.2, 1.attn.out, 1.attn.q, …."
    ]


def test_a_skip_pattern_that_matched_an_earlier_graph_does_not_warn():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with warnings.catch_warnings():
        warnings.simplefilter("error", Fp8Warning)
        step({**EAGER, "skip": ["0"]}, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Fp8Warning)
        step({**EAGER, "skip": ["0"]}, nn.Sequential(nn.ReLU(), nn.Linear(32, 32)))


# --- nothing converted


def test_nothing_converted_warns_with_the_main_reasons():
    with pytest.warns(Fp8Warning) as caught:
        step({"executor": "eager", "strict": True, "skip": ["mlp"]}, Block())
    (message,) = [str(w.message) for w in caught if w.category is Fp8Warning]
    assert message == (
        "fp8: NOTHING was converted in a graph with 11 matmuls: 6× skip='mlp'; "
        "5× a CPU has no FP8 matmul units; select='all' emulates FP8. "
        "What is saved for backward keeps its precision, so that nothing is rounded."
    )


def test_a_graph_without_matmuls_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error", Fp8Warning)
        torch.compile(lambda x: x.relu() + 1, backend="fp8", options=EAGER)(torch.randn(4))


def test_a_converted_graph_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error", Fp8Warning)
        assert len(step(EAGER, Block()).converted) == 11


def test_nothing_converted_gives_the_result_of_the_model_itself():
    model = Block()
    x = torch.randn(16, 32)
    with pytest.warns(Fp8Warning, match="NOTHING was converted"):
        compiled = torch.compile(model, backend="fp8", options={"executor": "eager", "strict": True})(x)
    torch.testing.assert_close(compiled, model(x))


# --- strict


def broken(c) -> None:
    raise ValueError("a pass that fails")


@pytest.fixture
def _broken_pass(monkeypatch):
    add_pass(monkeypatch, Stage.JOINT, "broken", broken, first=True)


@pytest.mark.usefixtures("_broken_pass")
def test_strict_raises_what_a_pass_raises():
    with pytest.raises(Exception, match="a pass that fails"):
        step(EAGER, Block())


@pytest.mark.usefixtures("_broken_pass")
def test_without_strict_a_failing_pass_leaves_the_graph_and_warns():
    model, x = Block(), torch.randn(16, 32)
    with pytest.warns(Fp8Warning, match=r"a pass failed \(ValueError: a pass that fails\)\. This graph is compiled"):
        compiled = torch.compile(model, backend="fp8", options={**EAGER, "strict": False})(x)
    torch.testing.assert_close(compiled, model(x))
    plan = fp8compile.last_compile()
    assert plan.failure == "ValueError: a pass that fails"
    assert plan.matmuls == []


def test_a_dump_goes_to_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OptionError, match=r"is the path of a folder, not .*, and .*file is a file: give"):
            Options.parse({"dump": path})
    assert Options.parse({"dump": tmp_path / "new" / "below"}).dump == str(tmp_path / "new" / "below")
