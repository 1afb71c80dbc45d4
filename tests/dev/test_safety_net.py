"""The record that a rework is compared with: it repeats itself, and a change is found."""

import copy

from dev.safety_net import Names, compare, record


def test_a_record_repeats_itself_and_a_changed_entry_is_found():
    before = record(Names(), "one slot, no drift") | record(Names(), "sdpa")
    assert set(before) == {"one slot, no drift, torch", "one slot, no drift, native", "sdpa"}
    assert compare(before, record(Names(), "one slot, no drift") | record(Names(), "sdpa")) == ({}, {})
    after = copy.deepcopy(before)
    after["sdpa"] = "#another output"
    after["one slot, no drift, torch"][0][2]["pairs"]["routed"] += 1
    wrong, renamed = compare(before, after)
    assert set(wrong) == {"sdpa", "one slot, no drift, torch"}
    assert not renamed


def test_names_are_told_apart_from_values():
    before = {"call": ["#out", {"backend": "portable", "beside": 3.5, "error": 0.25}]}
    after = {"call": ["#out", {"backend": "torch", "other work": 3.5, "error": 0.25}]}
    wrong, renamed = compare(before, after)
    assert not wrong
    assert dict(renamed) == {"'portable' -> 'torch'": 1, "key beside -> other work": 1}
    del after["call"][1]["error"]
    assert list(compare(before, after)[0]) == ["call"]


def test_an_entry_that_is_missing_differs():
    assert list(compare({"call": ["#out"]}, {})[0]) == ["call"]
