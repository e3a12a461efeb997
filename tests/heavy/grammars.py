"""Thousands of generated structures against the gate: each is answered within its limits.

    python -m tests.heavy.grammars [COUNT] [SEED]

JSON schemas, regular expressions, grammars in Lark and choices, small and large, of which many are
made to be costly. Each is answered as served or refused, in the CPU time that `GrammarLimits` gives
it and a little more; what is served compiles again in this process in that time, as in a worker,
and goes some tokens on; this process does not grow. The slowest ones are printed.
"""

import json
import random
import resource
import string
import sys
import time

from jax_specdec.requests import Request, RequestError, SamplingParams, Structured
from jax_specdec.structured.checks import StructureChecks
from jax_specdec.structured.limits import GrammarLimits
from jax_specdec.structured.matcher import Matcher
from jax_specdec.structured.vocabulary import read_vocabulary
from jax_specdec.text import byte_tokens

LIMITS = GrammarLimits()
SLACK = 4.0  # times the limit, of time: the machine does other things too
MOST_GROWN = 200  # MiB of this process
STOPS = (byte_tokens.EOS_ID,)


def word(rng, most=6):
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, most)))


def size(rng):
    """Mostly small, sometimes large numbers."""
    return int(10 ** rng.uniform(0, rng.choice((1, 2, 3, 6))))


def regex(rng, depth=3):
    """A regular expression, with bounds that multiply."""
    atoms = ["a", ".", "[a-z]", "[^x]", r"\d", r"\w", r"\p{L}", "(?i)yes", word(rng)]
    if not depth:
        return rng.choice(atoms)
    inner = regex(rng, depth - 1)
    low = min(size(rng), 2000)
    return rng.choice(
        [
            f"({inner}){{{low},{low + size(rng)}}}",
            f"({inner}){{{low}}}",
            f"({inner})*",
            f"({inner})+{regex(rng, depth - 1)}",
            f"({inner}|{regex(rng, depth - 1)})",
            f"({inner})?{regex(rng, depth - 1)}",
            f".*{inner}.{{{low}}}",
        ]
    )


def schema(rng, depth=3):
    """A JSON schema: numbers with multiples and ranges, patterns, lengths, many keys, branches."""
    number = rng.choice(("integer", "number"))
    leaves = [
        {"type": number, "multipleOf": size(rng) / rng.choice((1, 1, 1000))},
        {"type": number, "minimum": -size(rng), "maximum": size(rng)},
        {"type": number, "multipleOf": size(rng), "minimum": 0, "maximum": size(rng) * 10**6},
        {"type": "string", "minLength": rng.randint(0, 99), "maxLength": 99 + size(rng)},
        {"type": "string", "pattern": regex(rng, rng.randint(0, 2))},
        {"type": "string", "format": rng.choice(("date-time", "uuid", "ipv6", "email", "uri"))},
        {"enum": [word(rng) for _ in range(min(size(rng), 2000))]},
        {"const": word(rng)},
        {},
    ]
    if not depth:
        return rng.choice(leaves)
    inner = schema(rng, depth - 1)
    names = [f"{word(rng)}{n}" for n in range(min(size(rng), 800))]
    return rng.choice(
        [
            {"type": "array", "items": inner, "minItems": rng.randint(0, 9),
             "maxItems": 9 + size(rng)},
            {"type": "object", "properties": dict.fromkeys(names, inner),
             "required": names[: rng.randint(0, len(names))]},
            {"type": "object", "additionalProperties": inner},
            {"anyOf": [schema(rng, depth - 1) for _ in range(rng.randint(1, 6))]},
            {"oneOf": [schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]},
            {"allOf": [schema(rng, 0) for _ in range(rng.randint(1, 4))]},
            {"allOf": [{"type": "integer", "multipleOf": size(rng)} for _ in range(3)]},
            {"$defs": {"x": inner}, "type": "object",
             "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"$ref": "#"}}},
        ]
    )  # fmt: skip


def lark(rng):
    """A grammar in Lark: recursion, ambiguity, terminals with operators, schemas in it."""
    terminal, other = f"/{regex(rng, 2)}/", f"/{regex(rng, 1)}/"
    return rng.choice(
        [
            f'start: "{word(rng)}" start',
            f"start: A | A start\nA: {terminal}",
            f'start: a "x" a\na: a a | "{word(rng)}" | ""',
            f"start: A\nA: {terminal} & {other}",
            f"start: A\nA: {terminal} & ~{other}",
            f"start: A B\nA: ~{terminal}\nB: {other}",
            "start: " + " ".join(f"r{n}?" for n in range(min(size(rng), 500))) + "\n"
            + "\n".join(f'r{n}: "{word(rng)}"' for n in range(500)),
            f"start: %json {json.dumps(schema(rng, 2))}",
            f"start: A{{{size(rng)},{size(rng) + 10**6}}}\nA: {other}",
            f"start: x\nx[lazy]: {terminal}",
        ]
    )  # fmt: skip


def structure(rng):
    kind = rng.choice(("json_schema", "json_schema", "regex", "grammar", "choice"))
    made = {
        "json_schema": lambda: json.dumps(schema(rng, rng.randint(0, 3))),
        "regex": lambda: regex(rng, rng.randint(1, 4)),
        "grammar": lambda: lark(rng),
        "choice": lambda: json.dumps([word(rng, 12) for _ in range(min(size(rng), 6000))]),
    }[kind]()
    return kind, made


def grown():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main(count=2000, seed=0):
    rng = random.Random(seed)
    vocabulary = read_vocabulary("", byte_tokens.VOCAB_SIZE)
    checks = StructureChecks("", byte_tokens.VOCAB_SIZE, LIMITS)
    before, slow, faults = grown(), [], []
    served = exceeded = 0
    for number in range(count):
        kind, text = structure(rng)
        try:
            params = SamplingParams(structured=Structured(kind, text), stop_token_ids=STOPS)
        except RequestError:  # too long
            continue
        request, began = Request(id="r", prompt_token_ids=(1,), params=params), time.monotonic()
        why = ""
        try:
            checks.check(request)
            served += 1
        except RequestError as error:
            why = str(error)
            exceeded += "to compile it takes more" in why
        seconds = again = time.monotonic() - began
        if not why:
            began = time.monotonic()
            Matcher(vocabulary, params.structured, STOPS).try_texts()
            again = time.monotonic() - began
        slow.append((max(seconds, again), kind, text[:100], why[:90]))
        if max(seconds, again) > SLACK * LIMITS.cpu or "has ended" in why:
            faults.append((number, kind, text[:300], why, seconds, again))
    checks.close()
    more = grown() - before
    print(f"{count} structures: {served} served, {exceeded} beyond a limit, the rest refused")
    print(f"this process grew by {more} MiB")
    for line in sorted(slow, reverse=True)[:12]:
        print(f"{line[0]:.2f} s", *line[1:])
    for fault in faults:
        print("FAULT", fault)
    if not (count // 4 < served < count) or more > MOST_GROWN:
        faults.append("too few or too many are served, or the process has grown")
        print("FAULT", faults[-1])
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
