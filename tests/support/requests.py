"""Requests in short."""

from jax_specdec.requests import Request, SamplingParams


def request(id, prompt, **params):
    return Request(id=id, prompt_token_ids=tuple(prompt), params=SamplingParams(**params))
