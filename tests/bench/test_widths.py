"""The simulation of step widths: texts, times, and constants that are changed for a while."""

from dataclasses import replace

import pytest

from bench import widths
from jax_specdec.device.worker import step_widths

SURE = replace(widths.SCENES["repetitive, one slot"], right=(1.0, 1.0), wrong=(1.0, 1.0))
NEVER = replace(SURE, right=(0.0, 0.0), wrong=(0.0, 0.0))


def test_a_text_of_right_drafts_is_verified_at_full_width():
    """Four tokens a step of 1.25, but for noise and stalls."""
    full = widths.pace(SURE, 0, 300, widths.FULL)
    assert full == pytest.approx(4 / 1.25, rel=0.1)
    assert widths.pace(SURE, 0, 300) > 0.9 * full
    assert widths.pace(SURE, 0, 300, widths.NONE) == pytest.approx(1, rel=0.1)


def test_a_text_of_wrong_drafts_is_not_drafted_for():
    assert widths.pace(NEVER, 0, 300) > 0.95 * widths.pace(NEVER, 0, 300, widths.NONE)


def values():
    return step_widths.UNSEEN, step_widths.BETTER


def test_a_constant_is_changed_for_a_while():
    before = unseen, better = values()
    with widths.changed("UNSEEN", 0.5), widths.changed("BETTER", 2):
        assert values() == (unseen // 2, 2 * better - 1)
    assert values() == before


def test_every_constant_of_the_module_is_looked_at():
    names = {name for name, value in vars(step_widths).items()
             if name.isupper() and isinstance(value, int | float)}  # fmt: skip
    assert names == set(widths.CONSTANTS)


def test_no_width_is_where_no_draft_would_be_right():
    """Where drafts never pay, a wider step is made for its time alone: the control of the pace."""
    with widths.changed("UNSEEN", 1 / 64):
        often = widths.pace(NEVER, 0, 600)
    assert often < widths.pace(NEVER, 0, 600)
