"""The Flax NNX example, as a user runs it: pytest tests/docs/check_examples_nnx.py

Named so that the ordinary test run does not collect it: flax brings a dozen packages along.
"""

import re

from tests.docs.test_examples import EXAMPLES, run


def test_an_nnx_model_is_decoded_with_logprobs():
    text = run(EXAMPLES / "nnx_model.py")
    assert re.search(r"trained to 0\.\d\d and \d\.\d\d nats", text)
    # The window of 8 characters knows the text by heart; greedy decoding recites it.
    assert "Alice was beginning to get very tired of sitting by her sister on the" in text
    assert re.search(r"step 0  greedy .* logprob so far +-\d\.\d{3}", text)
    rate = re.search(r"accepted (\d+)% of the drafts", text)
    assert 0 < int(rate[1]) < 100
