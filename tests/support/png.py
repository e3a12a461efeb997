"""Pixels of screenshots."""

import io

import numpy as np
from PIL import Image


def most_common(png):
    """The most common color of a PNG, as (red, green, blue)."""
    with Image.open(io.BytesIO(png)) as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    colors, counts = np.unique(pixels, axis=0, return_counts=True)
    return tuple(colors[counts.argmax()].tolist())
