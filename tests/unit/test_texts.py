"""What a folder says about texts: ids that end one, the tokenizer, and chats, rendered as transformers renders them."""

import importlib.metadata
import json
import sys

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from steelyard import texts
from steelyard.errors import BadConfig, CheckpointError, ConfigError
from steelyard.texts import GenerationSettings, generation_settings, open_tokenizer, render_chat, require_rows
from support.parrot import bytes_tokenizer

USER = [{"role": "user", "content": "What is <b>2 + 2</b>?\n"}]
CHAT = [
    {"role": "system", "content": " Be brief. "},
    *USER,
    {"role": "assistant", "content": "4 – «vier»"},
    {"role": "user", "content": "Ünd 3 & 3?"},
]
TOKENS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False, "__type": "AddedToken"}}


def folder_of(path, config=None, generation=None, tokens=None, template=None):
    """Write the JSON files of a folder; None leaves one out."""
    path.mkdir(exist_ok=True)
    for name, content in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokens),
    ):
        if content is not None:
            (path / name).write_text(json.dumps(content))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


# --- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}, None, ((2,), 1, 0)),
        ({"eos_token_id": 2, "bos_token_id": 1}, {"eos_token_id": [5, 6], "pad_token_id": 7}, ((5, 6), 1, 7)),
        ({"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": -1}, None, ((2,), 1, None)),
        ({"eos_token_id": 2}, {"eos_token_id": None}, ((2,), None, None)),
        ({"eos_token_id": [2, 3, 2]}, {}, ((2, 3), None, None)),
        ({"eos_token_id": 2, "text_config": {"eos_token_id": 3, "bos_token_id": 4}}, None, ((3,), 4, None)),
        ({"eos_token_id": 2, "text_config": {}}, None, ((2,), None, None)),
        ({"eos_token_id": None}, {"max_length": 20, "max_new_tokens": 5, "temperature": 0.6}, ((), None, None)),
        ({}, None, ((), None, None)),
    ],
    ids=["config", "generation", "no padding", "null", "doubled", "nested", "around", "lengths", "nothing"],
)
def test_the_first_file_that_names_an_id_is_believed(tmp_path, config, generation, expected):
    found = generation_settings(folder_of(tmp_path, config, generation))
    assert found == GenerationSettings(tmp_path, *expected)


@pytest.mark.parametrize("value", [-1, True, 1.0, "2", [], [2, -1], [[2]], {}], ids=repr)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_id_that_is_none_is_refused(tmp_path, value, file):
    stated = {"eos_token_id": value}
    folder_of(tmp_path, stated if file == "config.json" else {}, stated if file != "config.json" else None)
    with pytest.raises(BadConfig) as caught:
        generation_settings(tmp_path)
    assert str(caught.value) == f"{tmp_path / file}: eos_token_id={value!r} is no token's id"


@pytest.mark.parametrize("key", ["bos_token_id", "pad_token_id"])
def test_one_token_begins_a_text_and_one_pads(tmp_path, key):
    with pytest.raises(BadConfig) as caught:
        generation_settings(folder_of(tmp_path, {key: [1]}))
    assert str(caught.value) == f"{tmp_path / 'config.json'}: {key}=[1] is no token's id"


@pytest.mark.parametrize("config", [{"vocab_size": 10}, {"vocab_size": 99, "text_config": {"vocab_size": 10}}], ids=str)
def test_an_id_past_the_vocabulary_is_refused(tmp_path, config):
    folder_of(tmp_path, config, {"eos_token_id": [9, 10]})
    with pytest.raises(BadConfig) as caught:
        generation_settings(tmp_path)
    where = tmp_path / "generation_config.json"
    assert str(caught.value) == f"{where}: eos_token_id=[9, 10] is no token's id: vocab_size is 10"


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
def test_a_file_that_is_no_object_is_refused(tmp_path, name):
    folder_of(tmp_path, {})
    (tmp_path / name).write_text("[1]")
    with pytest.raises(BadConfig) as caught:
        render_chat(tmp_path, USER) if name.startswith("tok") else generation_settings(tmp_path)
    assert str(caught.value) == f"{tmp_path / name}: is not an object"


def test_a_folder_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(CheckpointError):
        generation_settings(tmp_path / "nowhere")


# --- tokenizers --------------------------------------------------------------------------------------------------


def test_a_tokenizer_is_opened_as_its_file_has_it(tmp_path):
    made = bytes_tokenizer()
    made.enable_truncation(3)
    made.save(str(tmp_path / "tokenizer.json"))
    assert open_tokenizer(tmp_path).to_str() == made.to_str()


def test_without_the_tokenizers_package_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError) as caught:
        open_tokenizer(tmp_path)
    assert str(caught.value) == "texts need the tokenizers package; pip install 'steelyard[text]'"


def test_the_highest_id_must_be_a_row_of_the_model(tmp_path):
    tokenizer = bytes_tokenizer()
    require_rows(tokenizer, tmp_path, 260)
    require_rows(tokenizer, tmp_path, None)
    with pytest.raises(CheckpointError) as caught:
        require_rows(tokenizer, tmp_path, 259)
    assert str(caught.value) == (
        f"{tmp_path}: tokenizer.json has the id 259, and the config's vocab_size is 259; "
        "the two files belong to different models"
    )


# --- chats, as transformers renders them -------------------------------------------------------------------------

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] + eos_token}}
    {%- endif %}
{%- endfor %}
"""
PARTS = """{# blocks alone on a line leave no line behind #}
{% macro turn(m) %}
  {{ m.role }}: {{ m | tojson }} {{ m | tojson(indent=2) }}
{% endmacro %}
{% for m in messages %}
    {% if m.role == 'system' %}
        {% continue %}
    {% endif %}
{{ turn(m) }}{% generation %}{{ m.content.split(' ')[-1].upper() }}{% endgeneration %}
    {% if loop.index > 2 %}
        {% break %}
    {% endif %}
{% endfor %}
{{ dict(a=1).items() | list }} {{ dict.fromkeys('ab', 0) }} {{ nothing.at.all | default('none') if nothing else unk_token }}
{{ tools is none }} {{ documents is none }} {{ range(3) | list }} {{ add_generation_prompt }}

"""
TEMPLATES = {"chatml": CHATML, "llama-3": LLAMA3, "mistral": MISTRAL, "parts": PARTS}


def of_transformers(folder, messages):
    bytes_tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("name", list(TEMPLATES))
@pytest.mark.parametrize("messages", [USER, CHAT], ids=["one message", "a chat"])
@pytest.mark.parametrize("place", ["file", "text", "list"])
def test_a_chat_is_rendered_as_transformers_renders_it(tmp_path, name, messages, place):
    template = TEMPLATES[name]
    several = [{"name": "rag", "template": "never"}, {"name": "default", "template": template}]
    inside = {"text": template, "list": several, "file": "never"}[place]
    folder_of(tmp_path, {}, None, TOKENS | {"chat_template": inside}, template if place == "file" else None)
    got = render_chat(tmp_path, messages)
    assert got == of_transformers(tmp_path, messages)
    assert "never" not in got
    assert got


def test_a_template_needs_no_tokenizer_config(tmp_path):
    folder_of(tmp_path, template="[{{ bos_token }}{{ messages[0].content }}]")
    assert render_chat(tmp_path, [{"role": "user", "content": "é😀\ud800"}]) == "[é😀\ud800]"


def test_the_callers_messages_are_left_as_they_are(tmp_path):
    folder_of(tmp_path, template="{% set m = messages[0] %}{{ m.pop('content', '') }}")
    messages = [dict(USER[0])]
    with pytest.raises(CheckpointError):
        render_chat(tmp_path, messages)
    assert messages == USER


# --- chats that are refused --------------------------------------------------------------------------------------


def refusal(folder, messages=USER, kind=CheckpointError):
    with pytest.raises(kind) as caught:
        render_chat(folder, messages)
    return str(caught.value).replace(f"{folder}/", "")


def test_what_a_template_says_against_messages_is_told(tmp_path):
    folder_of(tmp_path, {}, None, TOKENS | {"chat_template": MISTRAL})
    assert refusal(tmp_path, USER + USER) == (
        "tokenizer_config.json: the chat template failed: "
        "After the optional system message, conversation roles must alternate user/assistant"
    )


HOSTILE = {
    "{{ ''.__class__.__mro__ }}": "access to attribute '__class__' of 'str' object is unsafe.",
    "{{ cycler.__init__.__globals__.os }}": "access to attribute '__init__' of 'type' object is unsafe.",
    "{{ messages.append(1) }}": "access to attribute 'append' of 'list' object is unsafe.",
    "{{ messages[0].update(role='x') }}": "access to attribute 'update' of 'dict' object is unsafe.",
    "{% set ns = namespace(__html__=1) %}": "a namespace may not have the name '__html__'",
    "{% set ns = namespace() %}{% set ns._x = 1 %}": "a namespace may not have the name '_x'",
    "{{ range(10**9) }}": (
        "OverflowError: Range too big. The sandbox blocks ranges larger than MAX_RANGE (100000)."
    ),
    "{{ 'a' * 10**10 }}": "MemoryError: ",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError: maximum recursion depth exceeded",
    "{{ 1 // 0 }}": "ZeroDivisionError: integer division or modulo by zero",
    "{% include '/etc/passwd' %}": "TypeError: no loader for this environment specified",
    "{{ messages[0].content.nothing.more }}": "'str object' has no attribute 'nothing'",
    "line\n{% if %}": "line 2: Expected an expression, got 'end of statement block'",
}  # fmt: skip


@pytest.mark.parametrize("template", list(HOSTILE))
def test_a_hostile_template_is_refused_in_one_sentence(tmp_path, template):
    """Nothing of python is within its reach, and it does not get more memory than is due to it."""
    said = refusal(folder_of(tmp_path, template=template))
    assert said.startswith(f"chat_template.jinja: the chat template failed: {HOSTILE[template]}"), said


@pytest.mark.parametrize("template", ["{{ '{0.__class__}'.format(1) }}", "{{ raise_exception.__globals__ }}"])
def test_what_is_forbidden_and_not_used_has_no_text(tmp_path, template):
    """As in transformers: jinja2 gives an undefined value, and says no more."""
    folder_of(tmp_path, {}, None, {"chat_template": f"[{template}]"})
    assert render_chat(tmp_path, USER) == of_transformers(tmp_path, USER) == "[]"


ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ 7 ** (10 ** 9) }}",
]


@pytest.mark.parametrize("template", ENDLESS, ids=["loops", "macros", "one operation"])
def test_a_template_that_goes_on_for_ever_is_ended(tmp_path, monkeypatch, template):
    monkeypatch.setattr(texts, "CHAT_SECONDS", 2)
    said = refusal(folder_of(tmp_path, template=template))
    assert said == "chat_template.jinja: the chat template ran for 2 seconds and was ended"


def test_a_process_that_ends_without_an_answer_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    said = refusal(folder_of(tmp_path, template="x"))
    assert said == "chat_template.jinja: the process of the chat template ended without an answer: exit status 1"


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (None, "{folder}: has no chat template, neither chat_template.jinja nor chat_template in tokenizer_config.json; "
               "it may not be a chat model: give it a plain prompt"),
        ({"chat_template": [{"name": "rag", "template": "x"}, {"name": "tool_use", "template": "y"}]},
         "{file}: has no chat template called default; there are: rag, tool_use"),
        ({"chat_template": []}, "{file}: has no chat template called default; there are: none"),
        ({"chat_template": [{"name": "default"}]},
         "{file}: chat_template is neither a text nor a list of objects with a name and a template"),
        ({"chat_template": 3},
         "{file}: chat_template is neither a text nor a list of objects with a name and a template"),
        ({"chat_template": "x", "bos_token": 3}, "{file}: bos_token=3 is neither a text nor an object with its content"),
        ({"chat_template": "x", "eos_token": {"content": None}},
         "{file}: eos_token={'content': None} is neither a text nor an object with its content"),
    ],
    ids=["none", "no default", "empty", "no text", "number", "token", "content"],
)  # fmt: skip
def test_a_folder_without_a_template_that_can_be_used_is_refused(tmp_path, tokens, text):
    folder_of(tmp_path, {}, None, tokens)
    with pytest.raises(CheckpointError) as caught:
        render_chat(tmp_path, USER)
    text = text.replace("{folder}", str(tmp_path)).replace("{file}", str(tmp_path / "tokenizer_config.json"))
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"\xff", "is not UTF-8 at byte 0"), (b" " * 5, "has 5 bytes, past the limit of 4")],
    ids=["bytes", "long"],
)
def test_a_template_file_that_cannot_be_read_is_named(tmp_path, monkeypatch, content, why):
    monkeypatch.setattr(texts, "MAX_TEMPLATE", 4)
    (tmp_path / "chat_template.jinja").write_bytes(content)
    assert refusal(tmp_path) == f"chat_template.jinja: {why}"


def test_a_template_file_that_leads_nowhere_is_named(tmp_path):
    (tmp_path / "chat_template.jinja").symlink_to(tmp_path / "gone")
    assert refusal(tmp_path).startswith("chat_template.jinja: link target missing: ")


def test_a_chat_without_a_message_is_refused(tmp_path):
    assert refusal(folder_of(tmp_path, template="x"), [], ConfigError) == "a chat needs at least one message"


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, "chat templates need the jinja2 package; pip install 'steelyard[text]'"),
        ("3.1.5", "chat templates need jinja2 3.1.6, and 3.1.5 is installed; pip install -U jinja2"),
        ("3.1", "chat templates need jinja2 3.1.6, and 3.1 is installed; pip install -U jinja2"),
    ],
    ids=str,
)
def test_without_a_safe_jinja_it_is_said_what_to_install(tmp_path, monkeypatch, found, text):
    def version(name):
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert refusal(folder_of(tmp_path, template="x"), USER, ConfigError) == text


def test_a_tokenizer_is_what_the_package_says_it_is(tmp_path):
    bytes_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert isinstance(open_tokenizer(tmp_path), Tokenizer)
