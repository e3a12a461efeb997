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
    return hidden @ _head(weights)


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
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
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
    if "head" in weights:
        return np.asarray(weights["head"], np.float64)
    return np.asarray(weights["embedding"], np.float64).T


def _decoder(weights: Mapping, sizes: Mapping, ids: np.ndarray) -> np.ndarray:
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    x = w["embedding"][ids]
    for index in range(sizes["num_layers"]):
        x = _layer(w, "layers.", index, sizes, x)
    return _norm(x, w["final_norm"], sizes["norm_eps"])


def _layer(w: Mapping, prefix: str, index: int, sizes: Mapping, x: np.ndarray) -> np.ndarray:
    get = {name.removeprefix(prefix): w[name][index] for name in w if name.startswith(prefix)}
    n, dh, heads = len(x), sizes["head_dim"], sizes["num_heads"]
    shared = heads // sizes["num_kv_heads"]
    eps = sizes["norm_eps"]
    y = _norm(x, get["attention_norm"], eps)
    q, k, v = (y @ get[name] + get.get(f"{name}_bias", 0) for name in ("query", "key", "value"))
    angles = _angles(sizes)
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
            scores = keys[: i + 1] @ queries[i] / np.sqrt(dh)
            weight = np.exp(scores - scores.max())
            mixed[i, mine] = (weight / weight.sum()) @ v[: i + 1, theirs]
    x = x + mixed @ get["output"] + get.get("output_bias", 0)
    y = _norm(x, get["mlp_norm"], eps)
    gate = y @ get["gate"]
    return x + (gate / (1 + np.exp(-gate)) * (y @ get["up"])) @ get["down"]


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return np.stack([row / np.sqrt(row @ row / len(row) + eps) * weight for row in x])


def _angles(sizes: Mapping) -> list[float]:
    """Radians a position, of each pair; each is scaled by itself, as the papers' text says."""
    dh, scaling = sizes["head_dim"], sizes.get("rope_scaling")
    angles = [sizes["rope_theta"] ** (-2.0 * pair / dh) for pair in range(dh // 2)]
    if scaling is None:
        return angles
    result = []
    for angle in angles:
        wavelength = 2 * np.pi / angle
        long = scaling["original_length"] / scaling["low_frequency_factor"]
        short = scaling["original_length"] / scaling["high_frequency_factor"]
        if scaling["kind"] == "linear" or wavelength > long:
            result.append(angle / scaling["factor"])
        elif wavelength < short:
            result.append(angle)
        else:
            ratio = scaling["original_length"] / wavelength - scaling["low_frequency_factor"]
            ratio /= scaling["high_frequency_factor"] - scaling["low_frequency_factor"]
            result.append((1 - ratio) * angle / scaling["factor"] + ratio * angle)
    return result


def _rotate(x: np.ndarray, angles: list[float]) -> np.ndarray:
    """Row n turned by n: the pair (a, a + Dh/2) is a complex number, times exp(i n angles[a])."""
    n, dh = x.shape
    turn = np.exp(1j * np.outer(np.arange(n), angles))
    z = (x[:, : dh // 2] + 1j * x[:, dh // 2 :]) * turn
    return np.hstack([z.real, z.imag])
