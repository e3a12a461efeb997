"""Chat templates in the manner of public models, each shortened to what makes it special."""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + "
    "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As TRL trains with: what the model says stands in a tag of transformers' own.
TRL = """\
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
<|im_start|>assistant
{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}

    {%- else %}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{% endif %}
    {{- "# Tools\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{% endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if thought %}{{- '<think>\n' + thought.strip() + '\n</think>\n\n' }}{% endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
GLM = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}
{{ tool.function.parameters | tojson(indent=2, ensure_ascii=True, sort_keys=true) }}
{{ dict(name=tool.function.name) | tojson(separators=(',', ':')) }}
{% endfor %}<|im_end|>{% endif %}
{%- set ns = namespace(count=0) %}
{%- for m in messages %}{% set ns.count = ns.count + 1 %}<|im_start|>{{ m.role }} {{ ns.count }}
{{ m.content }}<|im_end|>{% endfor %}<|im_start|>assistant"""
GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}\
{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}\
{% endif %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}\
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
# Other roles than a user's and an assistant's are left out, without a word.
SILENT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + "
    "' [/INST]' }}{% elif m.role == 'assistant' %}{{ m.content + eos_token }}{% endif %}"
    "{% endfor %}"
)
MISTRAL = """\
{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}\
{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]\
{% elif m.role == 'assistant' and m.tool_calls %}{% for call in m.tool_calls %}\
{% if call.id is not defined or call.id|length != 9 %}\
{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}\
[TOOL_CALLS]{{ call.function | tojson }}{% endfor %}{{ eos_token }}\
{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}\
{% elif m.role == 'tool' %}{% if m.tool_call_id|length != 9 %}\
{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}\
[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}"""
GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'developer' or m.role == 'system' %}<|im_start|>"
    "developer\n{{ m.content }}<|im_end|>{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>{% endif %}{% endfor %}<|im_start|>assistant\n"
)
