"""Recipes: what each name means, how they are changed, and every combination that cannot run."""

from __future__ import annotations

import dataclasses

import pytest

from fp8compile.errors import OptionError
from fp8compile.formats import BLOCK128, E4M3, E5M2, GROUP128, ROW, TENSOR, Granularity, parse_format, parse_granularity
from fp8compile.recipe import RECIPES, Cast, Delayed, Recipe, Role

# output, grad_input, grad_weight: the table of fp8compile/recipe.py
TABLE = {
    "mixed": ("e4m3 row × e4m3 tensor", "e4m3 tensor × e4m3 tensor", "e4m3 tensor × e4m3 tensor"),
    "tensorwise": ("e4m3 tensor × e4m3 tensor", "e5m2 tensor × e4m3 tensor", "e5m2 tensor × e4m3 tensor"),
    "rowwise": ("e4m3 row × e4m3 row", "e4m3 row × e4m3 row", "e4m3 row × e4m3 row"),
    "rowwise_with_gw_hp": ("e4m3 row × e4m3 row", "e4m3 row × e4m3 row", None),
    "blockwise": (
        "e4m3 group(128) × e4m3 block(128)",
        "e4m3 group(128) × e4m3 block(128)",
        "e4m3 group(128) × e4m3 group(128)",
    ),
    "auto": ("e4m3 row × e4m3 tensor", "e4m3 tensor × e4m3 tensor", "e4m3 tensor × e4m3 tensor"),  # at first
}


def written(role: Role | None) -> str | None:
    return None if role is None else f"{role.left} × {role.right}"


@pytest.mark.parametrize("name", TABLE)
def test_a_named_recipe_is_what_the_table_says(name):
    recipe = Recipe.named(name)
    assert recipe.name == name
    assert tuple(written(recipe.role(r)) for r in ("output", "grad_input", "grad_weight")) == TABLE[name]


def test_the_table_names_every_recipe():
    assert set(TABLE) == set(RECIPES)


def test_fast_accumulation_is_on_in_output_only():
    for recipe in RECIPES.values():
        assert not any(r.fast_accumulation for r in (recipe.grad_input, recipe.grad_weight) if r)
    assert RECIPES["mixed"].output.fast_accumulation
    assert not RECIPES["blockwise"].output.fast_accumulation


# --- parsing


def test_a_recipe_is_given_by_name_object_or_mapping():
    assert Recipe.parse("rowwise") is RECIPES["rowwise"]
    assert Recipe.parse(RECIPES["rowwise"]) is RECIPES["rowwise"]
    changed = Recipe.parse({"base": "rowwise", "grad_weight": None})
    assert changed.grad_weight is None
    assert changed.output == RECIPES["rowwise"].output
    assert Recipe.parse({"grad_weight": None}).output == RECIPES["mixed"].output


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("rowise", r"unknown recipe 'rowise'\. Did you mean 'rowwise'\? Valid: auto, blockwise, mixed, rowwise, "),
        ("xyz", r"unknown recipe 'xyz'\. Valid: auto, blockwise, mixed"),
        ({"base": "mixd"}, r"unknown recipe 'mixd'\. Did you mean 'mixed'\?"),
        ({"base": "mixed", "ouput": None}, r"unknown role 'ouput'\. Did you mean 'output'\?"),
        (17, "recipe must be a name, a Recipe or a mapping, not 17"),
        (None, "recipe must be a name, a Recipe or a mapping, not None"),
    ],
)
def test_a_bad_recipe_names_the_nearest(value, message):
    with pytest.raises(OptionError, match=message):
        Recipe.parse(value)


# --- override


def test_override_changes_what_it_names_and_nothing_else():
    mixed = RECIPES["mixed"]
    changed = mixed.override(
        grad_input={"left": {"format": "e5m2", "power_of_two": True}}, output={"fast_accumulation": False}
    )
    assert changed.name == "mixed*"
    assert changed.grad_input.left == Cast(TENSOR, E5M2, power_of_two=True)
    assert changed.grad_input.right == mixed.grad_input.right
    assert changed.output == dataclasses.replace(mixed.output, fast_accumulation=False)
    assert changed.grad_weight == mixed.grad_weight
    assert mixed == RECIPES["mixed"] == Recipe.named("mixed")


def test_override_without_changes_keeps_the_name():
    assert RECIPES["mixed"].override() == RECIPES["mixed"]


def test_override_takes_roles_casts_and_none():
    role = Role(Cast(ROW), Cast(ROW))
    assert RECIPES["mixed"].override(output=role).output == role
    assert RECIPES["mixed"].override(output=None).output is None
    assert RECIPES["mixed"].override(output={"left": Cast(TENSOR)}).output.left == Cast(TENSOR)


def test_override_brings_back_a_role_that_was_bf16():
    assert RECIPES["rowwise_with_gw_hp"].override(grad_weight={}).grad_weight == Role()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [(True, Delayed()), ({"history": 4, "margin": 1}, Delayed(4, 1)), (Delayed(3), Delayed(3)), (None, None)],
)
def test_delayed_is_given_as_true_mapping_object_or_none(given, wanted):
    assert RECIPES["tensorwise"].override(output={"left": {"delayed": given}}).output.left.delayed == wanted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lft": {}}, r"unknown field of a role 'lft'\. Did you mean 'left'\?"),
        ({"left": {"granularty": "row"}}, r"unknown field of an operand 'granularty'\. Did you mean 'granularity'\?"),
        ({"left": {"granularity": "rows"}}, r"unknown granularity 'rows'\. Did you mean 'row'\?"),
        ({"left": {"format": "e4m4"}}, r"unknown format 'e4m4'\. Did you mean 'e4m3'\?"),
        ({"left": "e5m2"}, "an operand is a Cast or a mapping of its fields, not 'e5m2'"),
        ("bf16", r"a role is a Role, None \(BF16\) or a mapping of its fields, not 'bf16'"),
        ({"right": {"delayed": {"history": 0}}}, "history must be a positive integer, at most 65536, not 0"),
        ({"right": {"delayed": {"margin": 0.5}}}, r"margin is an integer \(a power of two\) from -64 to 64, not 0.5"),
        ({"right": {"delayed": {"histroy": 4}}}, "histor"),
        ({"right": {"delayed": 16}}, "delayed"),
        ({"left": {"delayed": True}}, "delayed scaling keeps one amax a tensor; it cannot be used with row"),
        ({"fast_accumulation": "no"}, "fast_accumulation"),
        ({"left": {"power_of_two": "no"}}, "power_of_two"),
    ],
    ids=str,
)
def test_a_bad_change_says_what_is_wrong(change, message):
    with pytest.raises(OptionError, match=message):
        RECIPES["mixed"].override(output=change)


# --- what has a kernel

COARSE, FINE = (TENSOR, ROW), (GROUP128, BLOCK128)


@pytest.mark.parametrize("left", COARSE + FINE, ids=str)
@pytest.mark.parametrize("right", COARSE + FINE, ids=str)
def test_only_pairs_with_a_kernel_make_a_role(left, right):
    both_coarse = left in COARSE and right in COARSE
    both_fine = left in FINE and right in FINE and (left, right) != (BLOCK128, BLOCK128)
    if both_coarse or both_fine:
        assert Role(Cast(left), Cast(right)).left.granularity == left
        return
    message = rf"granularities {left} × {right} have no matmul kernel".replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(OptionError, match=message):
        Role(Cast(left), Cast(right))


@pytest.mark.parametrize("size", [16, 32, 64])
def test_small_groups_have_no_matmul_kernel(size):
    with pytest.raises(OptionError, match=rf"granularities group\({size}\) × block\(128\) have no matmul kernel"):
        Role(Cast(Granularity("group", size)), Cast(BLOCK128))


def test_two_e5m2_operands_are_refused():
    with pytest.raises(OptionError, match="E5M2 × E5M2: FP8 units multiply at most one E5M2 operand"):
        Role(Cast(TENSOR, E5M2), Cast(TENSOR, E5M2))
    assert Role(Cast(TENSOR, E5M2), Cast(TENSOR)).left.format is E5M2
    assert Role(Cast(TENSOR), Cast(ROW, E5M2)).right.format is E5M2


@pytest.mark.parametrize("formats", [(E5M2, E4M3), (E4M3, E5M2)], ids=str)
def test_fine_scales_take_e4m3_only(formats):
    with pytest.raises(OptionError, match=r"group\(128\) and block\(128\) matmuls take E4M3 only"):
        Role(Cast(GROUP128, formats[0]), Cast(BLOCK128, formats[1]))


@pytest.mark.parametrize("granularity", [ROW, GROUP128, BLOCK128], ids=str)
def test_delayed_scaling_is_for_tensor_scales(granularity):
    with pytest.raises(OptionError, match="delayed scaling keeps one amax a tensor"):
        Cast(granularity, delayed=Delayed())


# --- formats and granularities


@pytest.mark.parametrize("text", ["tensor", "row", "group(16)", "group(128)", "block(128)"])
def test_a_granularity_reads_back_what_it_writes(text):
    assert str(parse_granularity(text)) == text
    assert parse_granularity(parse_granularity(text)) == parse_granularity(text)


def test_spaces_in_a_granularity_do_not_matter():
    assert parse_granularity(" group( 128 ) ") == GROUP128


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rwo", r"unknown granularity 'rwo'\. Did you mean 'row'\?"),
        ("group(x)", r"unknown granularity 'group\(x\)'\. Did you mean 'group\("),
        ("group", "granularity 'group' with size 0: only group and block have a size"),
        ("row(16)", "granularity 'row' with size 16: only group and block have a size"),
        (128, "unknown granularity 128"),
    ],
)
def test_a_bad_granularity_says_what_is_wrong(text, message):
    with pytest.raises(OptionError, match=message):
        parse_granularity(text)


def test_a_granularity_of_an_unknown_kind_names_the_nearest():
    with pytest.raises(OptionError, match=r"unknown granularity 'tensr'\. Did you mean 'tensor'\?"):
        Granularity("tensr")


def test_formats_are_found_by_name():
    assert parse_format("e4m3") is E4M3
    assert parse_format(E5M2) is E5M2
    assert (E4M3.max, E5M2.max) == (448.0, 57344.0)
    with pytest.raises(OptionError, match=r"unknown format 'e5m3'\. Did you mean 'e[45]m[23]'\? Valid: e4m3, e5m2\."):
        parse_format("e5m3")


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("tensor", []),
        ("row", [3, 20, 1]),
        ("group(16)", [3, 20, 9]),
        ("group(128)", [3, 20, 2]),
        ("block(128)", [3, 1, 2]),
    ],
)
def test_the_shape_of_a_scale(text, shape):
    assert parse_granularity(text).scale_shape([3, 20, 140]) == shape


def test_a_cast_reads_like_a_sentence():
    assert str(Cast(ROW)) == "e4m3 row"
    assert str(Cast(TENSOR, E5M2, True, Delayed(8))) == "e5m2 tensor^2 delayed(8)"
