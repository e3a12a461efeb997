"""The long form of test_scheduling's property, which runs too many schedules for a fast test."""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.support.schedules import EVENTS, run_through


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(**EVENTS)
def test_whatever_happens_often_nothing_is_lost_or_doubled(**events):
    run_through(**events)
