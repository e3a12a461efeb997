"""A second implementation of the model that checks the first: NumPy, float64, no cache.

One sequence in, everything recomputed, written from the papers with explicit loops over heads.
It shares no code with the package: weights come in as a plain dictionary by dotted path
(`jax_specdec.device.model.params.named_arrays`, or tensors read from a file), sizes as keywords.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def logits(weights: Mapping, sizes: Mapping, ids) -> np.ndarray:
    """Logits [N, V] float64: row i predicts token i+1 from ids[0..i]."""
    hidden = _decoder(weights, sizes, np.asarray(ids))
    return _capped(hidden @ _head(weights), sizes.get("logit_softcap"))


def hidden_states(weights: Mapping, sizes: Mapping, ids) -> np.ndarray:
    """Hidden states [N, E] float64 after the final norm."""
    return _decoder(weights, sizes, np.asarray(ids))


def logprobs(weights: Mapping, sizes: Mapping, ids) -> np.ndarray:
    """log_softmax of `logits` [N, V] float64."""
    x = logits(weights, sizes, ids)
    x = x - x.max(axis=1)[:, None]
    return x - np.log(np.exp(x).sum(axis=1))[:, None]


def mtp_hidden(weights: Mapping, sizes: Mapping, hidden, next_ids) -> np.ndarray:
    """MTP hidden states [N, E] from hidden states [N, E] of positions 0..N-1 and their next ids."""
    w = _exact(weights)
    eps = sizes["norm_eps"]
    left = _norm(np.asarray(hidden, np.float64), w["mtp.hidden_norm"], eps)
    right = _norm(w["embedding"][np.asarray(next_ids)], w["mtp.token_norm"], eps)
    x = np.hstack([left, right]) @ w["mtp.projection"]
    x = _layer(w, "mtp.layers.", 0, sizes, x)
    return _norm(x, w["mtp.final_norm"], eps)


def mtp_logits(weights: Mapping, sizes: Mapping, ids) -> np.ndarray:
    """The MTP head's logits [N-1, V]: row i predicts token i+2 from ids[0..i+1]."""
    ids = np.asarray(ids)
    hidden = _decoder(weights, sizes, ids)
    return mtp_hidden(weights, sizes, hidden[:-1], ids[1:]) @ _head(weights)


def _head(weights: Mapping) -> np.ndarray:
    head = weights["head"] if "head" in weights else np.asarray(weights["embedding"]).T
    return np.asarray(head, np.float64)


def _decoder(weights: Mapping, sizes: Mapping, ids: np.ndarray) -> np.ndarray:
    w = _exact(weights)
    x = w["embedding"][ids]
    if sizes.get("scale_embedding"):
        x = x * np.sqrt(x.shape[1])
    for index in range(sizes["num_layers"]):
        x = _layer(w, "layers.", index, sizes, x)
    return _norm(x, w["final_norm"] + bool(sizes.get("norm_plus_one")), sizes["norm_eps"])


def _exact(weights: Mapping) -> dict[str, np.ndarray]:
    return {name: np.asarray(value, np.float64) for name, value in weights.items()}


def _capped(x, cap):
    return x if cap is None else cap * np.tanh(x / cap)


def _layer(w: Mapping, prefix: str, index: int, sizes: Mapping, x: np.ndarray) -> np.ndarray:
    get = {name.removeprefix(prefix): w[name][index] for name in w if name.startswith(prefix)}
    n, dh, heads = len(x), sizes["head_dim"], sizes["num_heads"]
    shared = heads // sizes["num_kv_heads"]
    eps = sizes["norm_eps"]
    if sizes.get("norm_plus_one"):
        get = {name: x + 1 if name.endswith("norm") else x for name, x in get.items()}
    slides = prefix == "layers." and index in sizes.get("sliding_layers", ())
    y = _norm(x, get["attention_norm"], eps)
    q, k, v = (y @ get[name] + get.get(f"{name}_bias", 0) for name in ("query", "key", "value"))
    angles = _angles(sizes)
    factor = (sizes.get("rope_scaling") or {}).get("attention_factor", 1)
    if slides and sizes["sliding_rope_theta"] is not None:
        angles, factor = _angles({**sizes, "rope_theta": sizes["sliding_rope_theta"],
                                  "rope_scaling": None}), 1  # fmt: skip
    mixed = np.zeros((n, heads * dh))
    for head in range(heads):
        mine = slice(head * dh, (head + 1) * dh)
        theirs = slice(head // shared * dh, (head // shared + 1) * dh)
        queries, keys = q[:, mine], k[:, theirs]
        if "query_norm" in get:
            queries = _norm(queries, get["query_norm"], eps)
            keys = _norm(keys, get["key_norm"], eps)
        queries, keys = _rotate(queries, angles), _rotate(keys, angles)
        for i in range(n):
            first = max(0, i + 1 - sizes["sliding_window"]) if slides else 0
            scores = factor**2 * keys[first : i + 1] @ queries[i]
            scores = scores * (sizes.get("attention_scale") or 1 / np.sqrt(dh))
            scores = _capped(scores, sizes.get("attention_softcap"))
            weight = np.exp(scores - scores.max())
            mixed[i, mine] = (weight / weight.sum()) @ v[first : i + 1, theirs]
    mixed = mixed @ get["output"] + get.get("output_bias", 0)
    x = x + (_norm(mixed, get["attention_post_norm"], eps) if sizes.get("post_norms") else mixed)
    y = _norm(x, get["mlp_norm"], eps)
    if sizes.get("num_experts"):
        out = np.stack([_experts(get, sizes, row) for row in y])
    else:
        out = _gated(sizes, y, get["gate"], get["up"], get["down"])
    return x + (_norm(out, get["mlp_post_norm"], eps) if sizes.get("post_norms") else out)


def _gated(sizes: Mapping, y, gate, up, down) -> np.ndarray:
    z = y @ gate
    if sizes.get("activation") == "gelu_tanh":
        z = z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    else:
        z = z / (1 + np.exp(-z))
    return (z * (y @ up)) @ down


def _experts(get: Mapping, sizes: Mapping, row) -> np.ndarray:
    """One row through its own experts, one after the other."""
    likely = np.exp(row @ get["router"])
    likely = likely / likely.sum()
    chosen = sorted(range(len(likely)), key=lambda x: -likely[x])[: sizes["experts_per_token"]]
    whole = sum(likely[x] for x in chosen) if sizes["renormalize_experts"] else 1
    parts = [_gated(sizes, row, *(get[name][x] for name in ("gate", "up", "down"))) for x in chosen]
    return sum(likely[x] / whole * part for x, part in zip(chosen, parts, strict=True))


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return np.stack([row / np.sqrt(row @ row / len(row) + eps) * weight for row in x])


def _angles(sizes: Mapping) -> list[float]:
    """Radians a position, of each pair; each is scaled by itself, as the papers' text says."""
    dh, scaling = sizes["head_dim"], sizes.get("rope_scaling")
    angles = [sizes["rope_theta"] ** (-2.0 * pair / dh) for pair in range(dh // 2)]
    if scaling is None:
        return angles
    if scaling["kind"] == "yarn":
        return _yarn(sizes, scaling, angles)
    result = []
    for angle in angles:
        wavelength = 2 * np.pi / angle
        long = scaling["original_length"] / scaling["low_frequency_factor"]
        short = scaling["original_length"] / scaling["high_frequency_factor"]
        ratio = scaling["original_length"] / wavelength - scaling["low_frequency_factor"]
        ratio /= scaling["high_frequency_factor"] - scaling["low_frequency_factor"]
        if scaling["kind"] == "linear" or wavelength > long:
            ratio = 0
        elif wavelength < short:
            ratio = 1
        result.append((1 - ratio) * angle / scaling["factor"] + ratio * angle)
    return result


def _yarn(sizes: Mapping, scaling: Mapping, angles: list[float]) -> list[float]:
    """By the paper's section 3.2, with a ramp over the pairs' indices as in its code."""

    def index(turns):
        period = np.log(scaling["original_length"] / turns / 2 / np.pi)
        return sizes["head_dim"] / 2 * period / np.log(sizes["rope_theta"])

    first, last = index(scaling["high_frequency_factor"]), index(scaling["low_frequency_factor"])
    if scaling["truncate"]:
        first, last = np.floor(first), np.ceil(last)
    first, last = max(first, 0), min(last, sizes["head_dim"] - 1)
    slowed = [min(max((pair - first) / (last - first), 0), 1) for pair in range(len(angles))]
    return [
        angle * (1 - share) + angle / scaling["factor"] * share
        for angle, share in zip(angles, slowed, strict=True)
    ]


def _rotate(x: np.ndarray, angles: list[float]) -> np.ndarray:
    """Row n turned by n: the pair (a, a + Dh/2) is a complex number, times exp(i n angles[a])."""
    n, dh = x.shape
    turn = np.exp(1j * np.outer(np.arange(n), angles))
    z = (x[:, : dh // 2] + 1j * x[:, dh // 2 :]) * turn
    return np.hstack([z.real, z.imag])
