"""How two plans differ, and whose plan counts."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from perdure.plan.elastic.commit import FRESH, MemberProgress
from perdure.plan.training_plan import describe_changes, digest_plan, find_strangers

PLAN = {
    "length": "320", "global_batch": "32", "micro_batch": "4", "seed": "0",
    "parameters": {"0.weight": "float32 [4, 8]", "0.bias": "float32 [4]"},
}  # fmt: skip
values = st.text(max_size=3)
tables = st.dictionaries(values, values, max_size=5)
plans = st.fixed_dictionaries(
    {"parameters": tables},
    optional={name: values for name in ("length", "micro_batch", "seed", "exact")},
)


def test_each_item_that_differs_is_named() -> None:
    other = PLAN | {"length": "328", "parameters": PLAN["parameters"] | {"0.bias": "float64 [4]"}}  # type: ignore[operator]
    assert describe_changes(PLAN, other) == (
        "the length of the dataset was 320, is 328; "
        "parameter 0.bias was float32 [4], is float64 [4]"
    )
    assert describe_changes(PLAN, PLAN | {"parameters": {}}) == (
        "parameter 0.weight was float32 [4, 8], is absent; "
        "parameter 0.bias was float32 [4], is absent"
    )


def test_members_have_in_common_what_a_resume_may_change() -> None:
    here = PLAN | {"steps": "60", "optimizer": "SGD", "modules": {"0": "Dropout(p=0.1)"}}
    there = here | {"steps": "90", "optimizer": "Adam", "modules": {"0": "Dropout(p=0.5)"}}
    assert digest_plan(here) != digest_plan(there)
    assert describe_changes(here, there) == ""
    assert describe_changes(here, there, members=True) == (
        "the optimizer was SGD, is Adam; the number of steps was 60, is 90; "
        "module 0 was Dropout(p=0.1), is Dropout(p=0.5)"
    )


def test_members_have_parameters_in_one_order() -> None:
    """huggingface/transformers#48162: the order of a set differs from process to process."""
    turned = PLAN | {"parameters": dict(reversed(PLAN["parameters"].items()))}  # type: ignore[attr-defined]
    assert digest_plan(PLAN) != digest_plan(turned)
    assert describe_changes(PLAN, turned) == "", "a resume goes by names"
    said = describe_changes(PLAN, turned, members=True)
    assert said == "parameter number 0 was 0.weight, is 0.bias"


def test_of_many_parameters_a_few_are_named() -> None:
    many = {str(number): "float32 [1]" for number in range(10)}
    said = describe_changes({"parameters": {}}, {"parameters": many})
    assert said.count("is float32 [1]") == 3
    assert said.endswith("; so do 7 more parameters")


def test_of_a_long_description_the_beginning_is_shown() -> None:
    here, there = ({"modules": {"0": "x" * 10**7 + end}} for end in "ab")
    assert digest_plan(here) != digest_plan(there)
    assert len(describe_changes(here, there, members=True)) < 1000
    odd = {"modules": {"0": "\ud800"}}
    assert describe_changes(odd, here, members=True).startswith("module 0 was \ud800, is xxx")
    assert digest_plan(odd) != digest_plan(here)


@given(plans, plans)
def test_plans_that_differ_have_other_digests_and_what_differs_is_said(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    orders = [list(plan["parameters"]) for plan in (one, other)]
    same = one == other and orders[0] == orders[1]
    assert (digest_plan(one) == digest_plan(other)) == same
    if one.keys() == other.keys():
        assert bool(describe_changes(one, other, members=True)) != same
        assert bool(describe_changes(one, other)) == (one != other)


@given(
    st.dictionaries(st.integers(0, 9), st.tuples(st.integers(FRESH, 3), st.booleans()), min_size=1)
)
def test_who_has_the_state_has_the_plan_that_counts(world: dict[int, tuple[int, bool]]) -> None:
    progress = {
        member: MemberProgress(applied, plan=str(like)) for member, (applied, like) in world.items()
    }
    known, strangers = find_strangers(progress)
    assert known not in strangers
    if any(applied != FRESH for applied, _ in world.values()):
        assert progress[known].applied != FRESH
    assert {progress[member].plan for member in progress if member not in strangers} == {
        progress[known].plan
    }
