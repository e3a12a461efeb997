"""When the next unit is expected: plain arithmetic."""

from ipc.rhythm import FIRST_NS, LAST_GAPS, LEAD_NS, NEVER, Rhythm

MS = 1_000_000


def after(*gaps: int) -> Rhythm:
    """A rhythm whose units came with these gaps, each of them waited for."""
    rhythm, now = Rhythm(), 1000 * MS
    rhythm.came(now)
    for gap in gaps:
        rhythm.window(now)  # a wait begins, and what the last one showed is learned
        now += gap
        rhythm.came(now)
    return rhythm


def test_nothing_is_expected_before_the_first_unit():
    assert Rhythm().window(5 * MS) == (NEVER, NEVER)


def test_the_first_interval_is_short_however_long_the_first_unit_took():
    rhythm = after()
    start, until = rhythm.window(1000 * MS)
    assert (start, until) == (1000 * MS + FIRST_NS - LEAD_NS, 1000 * MS + FIRST_NS + LEAD_NS)


def test_steady_gaps_are_met_in_the_middle_of_the_window():
    rhythm = after(*[8 * MS] * LAST_GAPS)
    expected = rhythm.last_ns + 8 * MS
    assert rhythm.window(rhythm.last_ns) == (expected - LEAD_NS, expected + LEAD_NS)
    assert rhythm.interval_ns == 8 * MS


def test_a_new_rhythm_is_learned_within_three_units_and_a_pause_is_none():
    for gaps, learned in (((5, 5, 5, 12, 12, 12), 12), ((5, 5, 5, 3000, 12), 5)):
        rhythm = after(*[gap * MS for gap in gaps])
        rhythm.window(rhythm.last_ns)
        assert rhythm.interval_ns == learned * MS


def test_a_late_wait_spins_at_once_and_no_longer():
    rhythm = after(*[8 * MS] * LAST_GAPS)
    now = rhythm.last_ns + 20 * MS
    assert rhythm.window(now) == (now, now + 2 * LEAD_NS)
    assert rhythm.window(now + MS) == (now, now + 2 * LEAD_NS)  # one window for one unit


def test_units_that_need_no_wait_move_the_next_one_and_do_not_shorten_the_interval():
    rhythm = after(*[8 * MS] * LAST_GAPS)
    rhythm.unwaited = 2
    last = rhythm.last_ns
    assert rhythm.window(last) == (last + 24 * MS - LEAD_NS, last + 24 * MS + LEAD_NS)
    for _ in range(LAST_GAPS):
        rhythm.unwaited = 2
        rhythm.came(rhythm.last_ns + 24 * MS)
        rhythm.window(rhythm.last_ns)
    assert rhythm.interval_ns == 8 * MS
