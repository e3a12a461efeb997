"""A look at requests' structures before anything of them reaches a worker."""

import functools

from jax_specdec.requests import Request, RequestError, Structured
from jax_specdec.structured.matcher import Matcher
from jax_specdec.structured.vocabulary import read_vocabulary

MOST_KEPT = 64  # structures that were found to be fine


class StructureChecks:
    """Refuses requests whose structures cannot be served; any thread may ask."""

    def __init__(self, texts: str, vocab_size: int) -> None:
        """Read nothing yet: `read_vocabulary`, whose arguments these are, does with the first."""
        vocabulary = functools.cache(functools.partial(read_vocabulary, texts, vocab_size))

        @functools.lru_cache(MOST_KEPT)
        def compile_one(structured: Structured, stop_token_ids: tuple[int, ...]) -> None:
            Matcher(vocabulary(), structured, stop_token_ids)

        self._compile = compile_one

    def check(self, request: Request) -> None:
        """Refuse a request whose structure cannot be compiled, or allows no first token.

        Raises:
          RequestError: says why.
        """
        params = request.params
        if params.structured is not None:
            try:
                self._compile(params.structured, params.stop_token_ids)
            except RequestError as error:
                raise RequestError(f"request {request.id!r}: {error}") from error
