"""Places in the checkout that tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
