"""The checks of a message's values on the device, before anything is sent."""

import pytest

from ipc.wire import DeviceCheck
from jax_specdec.device.worker.outgoing import DeviceCheckError
from tests.support import decoding
from tests.support.decoding import VOCAB, request


def test_a_failed_check_on_the_device_raises_in_the_worker_and_nothing_is_sent():
    item = request("r", [1, 2, 3], max_tokens=5, logprobs=1)

    def distort(output):
        return output._replace(token_ids=output.token_ids.at[0, 0].set(VOCAB))

    with pytest.raises(DeviceCheckError, match=DeviceCheck.TOKEN_ID.name):
        decoding.run([item], "none", distort=distort)

    def too_many(output):
        return output._replace(num_tokens=output.num_tokens + 9)

    with pytest.raises(DeviceCheckError, match=DeviceCheck.SLOT_COUNTS.name):
        decoding.run([item], "none", distort=too_many)
