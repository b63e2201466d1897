"""What a folder says about texts: its tokenizer, the tokens that end a text, and how a chat becomes a prompt; torch-free.

A chat template is a program that came with the checkpoint. It runs in jinja2's sandbox, in a process of its own that
has a bound on time and memory: nothing of the loader is within its reach, and it cannot go on for ever.

Source:
    transformers 5.24: ``generation_config.json`` goes before ``config.json``, ``chat_template.jinja`` before
    ``tokenizer_config.json``; ``utils/chat_template_utils.py`` is how a template runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from steelyard.checkpoint.configs import CONFIG, read_config, read_json
from steelyard.checkpoint.hub import locate
from steelyard.errors import BadConfig, CheckpointError, ConfigError
from steelyard.headers import explain, open_regular, read_bytes, shown

if TYPE_CHECKING:
    import jinja2
    from tokenizers import Tokenizer

NO_PADDING: Final = -1  # what early conversions of Llama write for a padding token that does not exist
GENERATION: Final = "generation_config.json"
TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
CHAT_TEMPLATE: Final = "chat_template.jinja"

CHAT_SECONDS = 10.0
"""Seconds that a chat template may run, the start of its process included; the longest known need a tenth of one."""

CHAT_MEMORY: Final = 1 << 30
"""Bytes of address space that its process may have."""

MAX_TEMPLATE: Final = 4 << 20
"""Bytes of the longest template file that is read; the longest known are below 64 KiB."""

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_INSTALL = "pip install 'steelyard[text]'"
_SAFE_JINJA = (3, 1, 6)  # older ones have known ways out of the sandbox
_CHILD = "from steelyard.texts import _answer; _answer()"


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """What a folder says about texts that a model writes.

    Attributes:
        folder: Where the checkpoint lies.
        eos: Ids of the tokens that end a text; empty if the folder names none.
        bos: Id of the token that begins one.
        pad: Id of the token that fills a batch.
    """

    folder: Path
    eos: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None


def generation_settings(path: str | os.PathLike[str]) -> GenerationSettings:
    """Read the settings of a folder: its ``generation_config.json``, and ``config.json`` where that is silent.

    Lengths and sampling that the files suggest are not taken: who asks for a text says both.

    Args:
        path: The folder, or a hub id that is in the local cache.
    Raises:
        CheckpointError: there is no such folder.
        BadConfig: a file is unreadable, or an id in it is no token's.
    """
    folder = locate(path, None)
    config = read_config(folder).content
    inner = config.get("text_config")
    levels = [inner, config] if isinstance(inner, dict) else [config]
    rows = next((one for one in (level.get("vocab_size") for level in levels) if isinstance(one, int)), None)
    places = [(folder / CONFIG, level) for level in levels]
    if os.path.lexists(folder / GENERATION):
        places.insert(0, (folder / GENERATION, _read_object(folder / GENERATION)))
    bos, pad = (_ids(key, places, rows, many=False) for key in ("bos_token_id", "pad_token_id"))
    eos = _ids("eos_token_id", places, rows, many=True)
    return GenerationSettings(folder, eos, next(iter(bos), None), next(iter(pad), None))


def _ids(
    key: str, places: Sequence[tuple[Path, Mapping[str, Any]]], rows: int | None, *, many: bool
) -> tuple[int, ...]:
    """Return the ids that the first place has under a key; none if no place says one."""
    for file, content in places:
        value = content.get(key)
        if value is None or (value == NO_PADDING and key == "pad_token_id"):
            continue
        ids = value if many and isinstance(value, list) else [value]
        if not ids or not all(type(one) is int and one >= 0 for one in ids):
            raise BadConfig(str(file), f"{key}={shown(repr(value))} is no token's id")
        if rows is not None and max(ids) >= rows:
            raise BadConfig(str(file), f"{key}={shown(repr(value))} is no token's id: vocab_size is {rows}")
        return tuple(dict.fromkeys(ids))
    return ()


def _read_object(file: Path) -> Mapping[str, Any]:
    content = read_json(file).content
    if not isinstance(content, dict):
        raise BadConfig(str(file), "is not an object")
    return content


# --- tokens ------------------------------------------------------------------------------------------------------


def open_tokenizer(folder: Path) -> Tokenizer:
    """Return a folder's tokenizer as its file has it, with the truncation and padding of its last use.

    Args:
        folder: The checkpoint's folder.
    Raises:
        CheckpointError: there is none, or it cannot be read.
        ConfigError: the tokenizers package is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise ConfigError(f"texts need the tokenizers package; {_INSTALL}") from error
    file = folder / TOKENIZER
    if not file.is_file():
        raise CheckpointError(
            f"{folder}: has no {TOKENIZER}; transformers writes one with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the package raises bare Exception for every unreadable file
        raise CheckpointError(f"{file}: {error}") from error


def require_rows(tokenizer: Tokenizer, folder: Path, rows: object) -> None:
    """Refuse a tokenizer that has ids past a model's vocabulary.

    Args:
        tokenizer: The folder's tokenizer.
        folder: The checkpoint's folder.
        rows: Tokens of the model; anything but an int is not compared.
    Raises:
        CheckpointError: it has one; it would fail at the first text that has it.
    """
    highest = max(tokenizer.get_vocab().values(), default=0)
    if isinstance(rows, int) and highest >= rows:
        raise CheckpointError(
            f"{folder}: {TOKENIZER} has the id {highest}, and the config's vocab_size is {rows}; "
            "the two files belong to different models"
        )


# --- chats -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """What turns messages into a prompt.

    Attributes:
        text: A jinja2 template.
        file: Where it stands.
        tokens: The special tokens that it may name, such as ``bos_token``.
    """

    text: str
    file: Path
    tokens: Mapping[str, str]


def chat_template(folder: Path) -> ChatTemplate:
    """Return a folder's chat template; of several the one called ``default``.

    Args:
        folder: The checkpoint's folder.
    Raises:
        CheckpointError: there is none, none is called ``default``, or a file is unreadable.
    """
    file, own = folder / TOKENIZER_CONFIG, folder / CHAT_TEMPLATE
    config = _read_object(file) if os.path.lexists(file) else {}
    tokens = _named_tokens(file, config)
    if os.path.lexists(own):
        return ChatTemplate(_read_text(own), own, tokens)
    stated = config.get("chat_template")
    if stated is None:
        raise CheckpointError(
            f"{folder}: has no chat template, neither {CHAT_TEMPLATE} nor chat_template in {TOKENIZER_CONFIG}; "
            "it may not be a chat model: give it a plain prompt"
        )
    return ChatTemplate(_default(file, stated), file, tokens)


def _default(file: Path, stated: object) -> str:
    """Return a template, or of a list of named ones the default."""
    if isinstance(stated, str):
        return stated
    if not isinstance(stated, list) or not all(
        isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("template"), str)
        for one in stated
    ):
        raise BadConfig(str(file), "chat_template is neither a text nor a list of objects with a name and a template")
    named = {one["name"]: one["template"] for one in stated}
    if "default" not in named:
        there = ", ".join(map(shown, named)) or "none"
        raise BadConfig(str(file), f"has no chat template called default; there are: {there}")
    template: str = named["default"]
    return template


def _named_tokens(file: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a tokenizer's config names: each a text, or an object with its content."""
    found = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
        elif value is not None:
            raise BadConfig(str(file), f"{name}={shown(repr(value))} is neither a text nor an object with its content")
    return found


def _read_text(file: Path) -> str:
    try:
        with open_regular(file) as (handle, status):
            if status.st_size > MAX_TEMPLATE:
                raise BadConfig(str(file), f"has {status.st_size} bytes, past the limit of {MAX_TEMPLATE}")
            return read_bytes(handle, status.st_size, 0).decode("utf-8")
    except OSError as error:
        raise BadConfig(str(file), explain(file, error)) from error
    except UnicodeDecodeError as error:
        raise BadConfig(str(file), f"is not UTF-8 at byte {error.start}") from error


def render_chat(folder: Path, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the prompt that a folder's chat template makes of messages, up to where the model's answer begins.

    The template writes every special token itself: encode the prompt without adding any.

    Args:
        folder: The checkpoint's folder.
        messages: Each with ``role`` and ``content``, oldest first; plain data.
    Raises:
        CheckpointError: there is no template, or it refuses the messages, does what is forbidden, or takes too long.
        ConfigError: there is no message, or jinja2 is not installed or too old to be safe.
    """
    if not messages:
        raise ConfigError("a chat needs at least one message")
    template = chat_template(folder)
    _require_jinja()
    variables = {"messages": list(messages), "tools": None, "documents": None, "add_generation_prompt": True}
    order = {"template": template.text, "variables": {**template.tokens, **variables}, "seconds": CHAT_SECONDS}
    return _ask(template.file, json.dumps(order))


def _require_jinja() -> None:
    from importlib.metadata import PackageNotFoundError, version

    from packaging.version import Version

    try:
        found = version("jinja2")
    except PackageNotFoundError as error:
        raise ConfigError(f"chat templates need the jinja2 package; {_INSTALL}") from error
    if Version(found).release < _SAFE_JINJA:
        least = ".".join(map(str, _SAFE_JINJA))
        raise ConfigError(f"chat templates need jinja2 {least}, and {found} is installed; pip install -U jinja2")


def _ask(file: Path, order: str) -> str:
    """Let a process of its own render a template."""
    paths = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _CHILD],
            input=order,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=CHAT_SECONDS,
            check=False,
            env={**os.environ, "PYTHONPATH": paths},
        )
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"{file}: the chat template ran for {CHAT_SECONDS:g} seconds and was ended") from error
    try:
        answer = json.loads(done.stdout)
    except ValueError as error:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise CheckpointError(f"{file}: the process of the chat template ended without an answer: {last}") from error
    if "text" not in answer:
        raise CheckpointError(f"{file}: the chat template failed: {answer['error']}")
    text: str = answer["text"]
    return text


def _answer() -> None:
    """Render the template that stdin holds; this is the whole life of its process."""
    import resource

    import jinja2

    order = json.load(sys.stdin)
    for kind, bound in ((resource.RLIMIT_CPU, int(order["seconds"]) + 1), (resource.RLIMIT_AS, CHAT_MEMORY)):
        _, most = resource.getrlimit(kind)
        resource.setrlimit(kind, (bound if most == resource.RLIM_INFINITY else min(bound, most), most))
    try:
        answer = {"text": _sandbox().from_string(order["template"]).render(order["variables"])}
    except jinja2.TemplateSyntaxError as error:
        answer = {"error": f"line {error.lineno}: {error.message}"}
    except jinja2.TemplateError as error:
        answer = {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - whatever a foreign program raises is told to the user
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer))


def _sandbox() -> jinja2.Environment:
    """Return the environment that templates are written for, as transformers makes it."""
    from datetime import datetime

    import jinja2
    import jinja2.ext
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """``{% generation %}``, which marks what an assistant said for training; here it is only its content."""

        tags = {"generation"}

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            """Return what stands between the tags."""
            next(parser.stream)
            return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))

    class Namespace(jinja2.utils.Namespace):
        """A namespace without hidden names: what python calls behind them would not pass the sandbox."""

        def __init__(self, /, *args: Any, **given: Any) -> None:
            stated = dict(*args, **given)
            super().__init__()
            for name, value in stated.items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"a namespace may not have the name {name!r}")
            super().__setitem__(name, value)

    class Dict:
        """``dict`` without the class's own attributes."""

        def __call__(self, /, *args: Any, **given: Any) -> dict[Any, Any]:
            return dict(*args, **given)

        def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
            """Return a dict with one value for all keys."""
            return dict.fromkeys(keys, value)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": Dict(),
        "namespace": Namespace,
    }
    return sandbox
