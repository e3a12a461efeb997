"""Which packages and doors there are, and what runs without jax."""

from tests.support.paths import ROOT

PACKAGES = ("ipc", "pallas_kernels", "jax_specdec")


# What a door's package lets others import: itself, and these.
DOORS = {
    "ipc": {"ipc", "ipc.wire", "ipc.doctor", "ipc.field_docs"},
    "pallas_kernels": {"pallas_kernels", "pallas_kernels.sampling"},
    "jax_specdec": {
        "jax_specdec.engine", "jax_specdec.export", "jax_specdec.ray",
        "jax_specdec.device", "jax_specdec.device.drafting", "jax_specdec.device.model",
        "jax_specdec.adapters",
    },
}  # fmt: skip


def modules(*tops):
    """Dotted name to path of every module below the folders `tops`."""
    found = {}
    for top in tops:
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


def is_engine_side(name):
    """Whether a shipped module must run in a process without jax."""
    return name.startswith(("ipc", "jax_specdec")) and not name.startswith(
        ("jax_specdec.device", "jax_specdec.adapters")
    )


def tops(names):
    return {name.partition(".")[0] for name in names}
