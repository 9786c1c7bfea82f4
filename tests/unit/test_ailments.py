"""What of a tier does not work, by the kind of call."""

from __future__ import annotations

from kvtier.tiers.ailments import IN_A_ROW, Ailments


def test_what_fails_in_a_row_is_told_until_it_works():
    ails = Ailments()
    for number in range(IN_A_ROW):
        assert ails.trouble() == ""
        ails.fails("write", f"cause {number}")
        ails.works("read")
    assert ails.trouble() == f"write: cause {IN_A_ROW - 1}"
    ails.works("write")
    assert ails.trouble() == ""
    ails.fails("write", "again")
    assert ails.trouble() == ""
    assert ails.trouble(1) == "write: again"


def test_kinds_of_calls_are_told_apart():
    ails = Ailments()
    for _ in range(IN_A_ROW):
        ails.fails("write", "no room on the device")
        ails.fails("read", "the medium")
    assert ails.trouble() == "read: the medium; write: no room on the device"
