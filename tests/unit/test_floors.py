"""pyproject.toml says of each dependency from which version on it works."""

from collections import defaultdict

from tests.floors import ROOT, TESTS, list_floors, read_constraints, read_requirements


def test_each_dependency_has_one_lowest_version() -> None:
    floors = defaultdict(set)
    for name, lowest in list_floors():
        floors[name].add(lowest)
    assert {name: found for name, found in floors.items() if len(found) > 1 or "" in found} == {}


def test_the_tests_of_the_lowest_versions_are_there() -> None:
    assert [name for name in TESTS if not (ROOT / name).exists()] == []


def test_the_versions_that_tests_run_with_are_allowed() -> None:
    pins = read_constraints()
    for requirements in read_requirements().values():
        for one in requirements:
            pin = pins.get(one.name.lower().replace("_", "-"))
            assert pin is None or one.specifier.contains(pin), f"{one}: tests run with {pin}"


def test_libraries_with_overridden_private_methods_have_an_upper_bound() -> None:
    bounded = {"nats-py", "torchft"}
    for requirements in read_requirements().values():
        for one in requirements:
            if one.name in bounded:
                assert any(s.operator in ("<", "==") for s in one.specifier), str(one)
