"""Client libraries against one running server: texts, streams, logprobs, tools, structured answers.

    python -m tests.heavy.usual_clients [PYTHON PYTHON PYTHON]

openai, litellm, langchain-openai, instructor, inspect-ai and llm are in environments of their own,
which are made in build/clients (a package index is needed), or whose interpreters are given;
Vercel's AI SDK is asked where npm is. The server runs in this one, with the tiny model. Each
library asks as its own guide says, and puts
answers back into the conversation. A model of bytes calls no function by itself and finds no good
values: what is checked is that every call is served, and that what must be of a form is of it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tests.support.served_process import served

OPENAI = """
from typing import Literal
import json, openai
from pydantic import BaseModel
client = openai.OpenAI(base_url=URL, api_key="none")
messages = [{"role": "user", "content": "def"}]
made = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=5,
    logprobs=True, top_logprobs=2, store=False, metadata={}, service_tier="auto")
assert len(made.choices[0].logprobs.content) == 5
messages += [made.choices[0].message.model_dump(), {"role": "user", "content": "x"}]
parts = client.chat.completions.create(model="tiny", messages=messages, max_tokens=5, stream=True,
    stream_options={"include_usage": True})
assert [part for part in parts][-1].usage.completion_tokens == 5
class Point(BaseModel):
    x: Literal[1, 2]
    side: bool
parsed = client.chat.completions.parse(model="tiny", messages=messages, max_tokens=600,
    response_format=Point, temperature=0)
assert isinstance(parsed.choices[0].message.parsed, Point)
function = {"name": "turn", "parameters": Point.model_json_schema()}
tools = [{"type": "function", "function": function}]
called = client.chat.completions.create(model="tiny", messages=messages, max_tokens=600,
    tools=tools, tool_choice="required", temperature=0)
call, = called.choices[0].message.tool_calls
assert set(json.loads(call.function.arguments)) == {"x", "side"}
messages += [called.choices[0].message.model_dump(),
             {"role": "tool", "tool_call_id": call.id, "content": "done"}]
assert client.chat.completions.create(model="tiny", messages=messages, max_tokens=3, tools=tools,
    tool_choice="none").choices[0].message
assert client.completions.create(model="tiny", prompt="def", max_tokens=3, logprobs=2).choices
assert client.models.list().data[0].id == "tiny"
"""
LITELLM = """
import litellm
messages = [{"role": "user", "content": "def"}]
ask = dict(model="openai/tiny", api_base=URL, api_key="none", messages=messages)
made = litellm.completion(**ask, max_tokens=5, logprobs=True, top_logprobs=2)
assert made.usage.completion_tokens == 5
messages += [made.choices[0].message.model_dump(), {"role": "user", "content": "x"}]
assert [part for part in litellm.completion(**ask, max_tokens=5, stream=True)]
tools = [{"type": "function", "function": {"name": "turn", "parameters": {"type": "object",
    "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}}}]
made = litellm.completion(**ask, tools=tools, tool_choice="required", max_tokens=600, temperature=0)
assert made.choices[0].message.tool_calls[0].function.name == "turn"
assert litellm.text_completion(model="text-completion-openai/tiny", api_base=URL, api_key="none",
    prompt="def", max_tokens=3).choices
"""
LANGCHAIN = """
from typing import Literal
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
model = ChatOpenAI(base_url=URL, api_key="none", model="tiny", temperature=0, max_tokens=600)
answer = model.bind(max_tokens=5, logprobs=True).invoke("def")
assert answer.response_metadata["logprobs"]
assert model.bind(max_tokens=5).invoke([("user", "def"), answer, ("user", "x")])
assert [part for part in model.bind(max_tokens=5).stream("def")]
class Point(BaseModel):
    "A point."
    x: Literal[1, 2] = Field(description="where")
    side: bool
for method in ("json_schema", "function_calling"):
    found = model.with_structured_output(Point, method=method).invoke("def")
    assert isinstance(found, Point), method
bound = model.bind_tools([Point], tool_choice="Point")
assert bound.invoke("def").tool_calls[0]["name"] == "Point"
assert model.bind_tools([Point]).bind(max_tokens=5).invoke("def") is not None
"""
INSTRUCTOR = """
from typing import Literal
import instructor, openai
from pydantic import BaseModel, ConfigDict
class Point(BaseModel):
    model_config = ConfigDict(extra="forbid")  # or a model of bytes adds keys without end
    x: Literal[1, 2]
    side: bool
client = openai.OpenAI(base_url=URL, api_key="none")
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    made = instructor.from_openai(client, mode=mode).chat.completions.create(model="tiny",
        response_model=Point, messages=[{"role": "user", "content": "def"}], max_tokens=600,
        temperature=0, max_retries=0)
    assert isinstance(made, Point), mode
"""
INSPECT = """
from typing import Literal
import asyncio
from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
from inspect_ai.tool import ToolInfo, ToolParams, ToolParam
from inspect_ai.util import json_schema
async def main():
    model = get_model("openai-api/own/tiny", base_url=URL, api_key="none",
        config=GenerateConfig(max_tokens=5, logprobs=True, top_logprobs=2, temperature=0))
    made = await model.generate("def")
    assert made.choices[0].logprobs.content
    from pydantic import BaseModel
    class Point(BaseModel):
        x: Literal[1, 2]
    asked = GenerateConfig(max_tokens=600, response_schema=ResponseSchema(name="point",
        json_schema=json_schema(Point)))
    assert Point.model_validate_json((await model.generate("def", config=asked)).completion)
    tool = ToolInfo(name="turn", description="Turn it", parameters=ToolParams(
        properties={"x": ToolParam(type="boolean", description="how far")}, required=["x"]))
    made = await model.generate("def", tools=[tool], tool_choice="any",
        config=GenerateConfig(max_tokens=600))
    assert made.message.tool_calls[0].function == "turn"
asyncio.run(main())
"""
LLM = """
import os, pathlib, tempfile
folder = pathlib.Path(tempfile.mkdtemp())
os.environ["LLM_USER_PATH"] = str(folder)
(folder / "extra-openai-models.yaml").write_text(
    f"- model_id: own\\n  model_name: tiny\\n  api_base: {URL}\\n")
import llm
model = llm.get_model("own")
model.key = "none"
assert model.prompt("def", stream=False, max_tokens=5).text()
assert len([part for part in model.prompt("def", max_tokens=5)]) >= 1
talk = model.conversation()
assert talk.prompt("def", max_tokens=5).text() and talk.prompt("x", max_tokens=5).text()
"""
VERCEL = """
import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";
const own = createOpenAICompatible({ name: "own", baseURL: URL, apiKey: "none",
  includeUsage: true, supportsStructuredOutputs: true });
const ask = { model: own("tiny"), prompt: "def", temperature: 0 };
const made = await generateText({ ...ask, maxOutputTokens: 5,
  providerOptions: { own: { logprobs: true, top_logprobs: 2 } } });
assert.equal(made.usage.outputTokens, 5);
assert.equal(made.response.body.choices[0].logprobs.content.length, 5);
const parts = streamText({ model: own("tiny"), maxOutputTokens: 5, messages: [
  { role: "user", content: "def" }, { role: "assistant", content: made.text },
  { role: "user", content: "x" }] });
for await (const part of parts.textStream) assert.equal(typeof part, "string");
assert.equal((await parts.usage).outputTokens, 5);
const schema = jsonSchema({ type: "object", required: ["x", "side"], additionalProperties: false,
  properties: { x: { enum: [1, 2] }, side: { type: "boolean" } } });
const parsed = await generateText({ ...ask, maxOutputTokens: 600,
  output: Output.object({ schema }) });
assert([1, 2].includes(parsed.output.x));
const called = await generateText({ ...ask, maxOutputTokens: 600, toolChoice: "required",
  tools: { turn: tool({ description: "Turn it", inputSchema: schema }) } });
assert.equal(called.toolCalls[0].toolName, "turn");
const completed = await generateText({ ...ask, model: own.completionModel("tiny"),
  maxOutputTokens: 3 });
assert.equal(completed.usage.outputTokens, 3);
"""
# Environments, and who asks in each: inspect-ai needs a newer openai than litellm takes.
ENVIRONMENTS = {
    "openai litellm langchain-openai instructor": {
        "openai": OPENAI, "litellm": LITELLM, "langchain-openai": LANGCHAIN,
        "instructor": INSTRUCTOR},
    "openai inspect-ai": {"the newest openai": OPENAI, "inspect-ai": INSPECT},
    "llm": {"llm": LLM},
}  # fmt: skip
FOLDER = Path("build/clients")


def interpreter(number, packages):
    """The Python of an environment with these packages, which is made where it is not there."""
    folder = FOLDER / str(number)
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-U", *packages.split()], check=True)
    return python.absolute()


def node_modules():
    """A folder with Vercel's AI SDK, made where it is not there; None without Node."""
    folder = FOLDER / "vercel"
    if not (folder / "node_modules/ai").exists():
        if shutil.which("npm") is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        packages = ("ai", "@ai-sdk/openai-compatible")
        subprocess.run(["npm", "install", "--silent", *packages], cwd=folder, check=True)
    return folder


def ask_from_node(url):
    """Whether Vercel's SDK is served; None without Node."""
    folder = node_modules()
    if folder is None:
        print("Vercel's AI SDK: NOT RUN, there is no npm")
        return None
    (folder / "client.mjs").write_text(f"const URL = {url!r};\n{VERCEL}")
    done = subprocess.run(["node", "client.mjs"], capture_output=True, text=True, cwd=folder)
    print(f"Vercel's AI SDK: {'served' if done.returncode == 0 else 'FAILED'}", flush=True)
    print(done.stderr[-2000:], end="")
    return done.returncode == 0


def main(*pythons):
    found = pythons or [interpreter(*pair) for pair in enumerate(ENVIRONMENTS)]
    faults = []
    with tempfile.TemporaryDirectory() as folder, served("--max-length", "4096") as server:
        for python, clients in zip(found, ENVIRONMENTS.values(), strict=True):
            for name, code in clients.items():
                path = Path(folder) / "client.py"
                path.write_text(f"URL = {server.url + '/v1'!r}\n{code}")
                # No library asks others than this server.
                env = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}
                done = subprocess.run([python, path], capture_output=True, text=True, env=env)
                print(f"{name}: {'served' if done.returncode == 0 else 'FAILED'}", flush=True)
                if done.returncode:
                    faults.append(name)
                    print(done.stderr[-2000:])
        if ask_from_node(server.url + "/v1") is False:
            faults.append("Vercel's AI SDK")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
