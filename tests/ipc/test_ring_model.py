"""The ring against a model: a bounded queue of byte strings with an end.

`.ci/heavy ring` runs more, and random, examples.
"""

from hypothesis import settings

from tests.support.ring_machine import RingMachine

TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=40, stateful_step_count=40)
