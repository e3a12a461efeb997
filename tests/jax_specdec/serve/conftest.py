import openai
import pytest

from tests.support.http_server import serving


@pytest.fixture(scope="package")
def server():
    with serving() as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made
