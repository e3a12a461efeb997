"""The versions of peers that the adapters were tried with."""

from importlib import metadata

# Name of the distribution: versions that the lane `peers` runs.
TRIED = {
    "google-tunix": ("0.1.7",),
    "maxtext": ("0.2.5",),
    "sglang-jax": ("0.0.2",),
    "tpu-inference": ("0.32.0",),
}


def check_version(distribution: str) -> None:
    """Refuse a peer of a version that its adapter was not tried with.

    Raises:
      ImportError: it is not installed, or has another version; the message names both.
    """
    tried = " or ".join(TRIED[distribution])
    try:
        found = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        raise ImportError(
            f"{distribution} is not installed; the adapter was tried with {tried}: "
            f"pip install {distribution}=={TRIED[distribution][-1]}"
        ) from None
    if found not in TRIED[distribution]:
        raise ImportError(
            f"{distribution} {found} is installed, but the adapter was tried with {tried}: install "
            "that, or call the adapter's functions where you have logits"
        )
