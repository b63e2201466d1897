"""How a sentence-transformers folder turns hidden states into one vector: read from its JSON files, torch-free.

Source:
    The folder layout of sentence-transformers 2 to 5: ``modules.json`` lists the modules in order, each with a type and
    a folder; a pooling module's ``config.json`` names its modes; ``Normalize`` has nothing to store, so its folder may be
    absent; ``sentence_bert_config.json`` has the length to cut texts at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from steelyard.checkpoint.configs import read_json
from steelyard.checkpoint.hub import locate
from steelyard.errors import BadConfig

PoolingMode: TypeAlias = Literal["mean", "cls", "max", "mean_sqrt_len", "last"]

_MODES: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_lasttoken": "last",
}
_CHAIN = ["Transformer", "Pooling", "Normalize"]
_LENGTH_FILES = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json")


@dataclass(frozen=True, slots=True)
class SentenceSettings:
    """What stands between hidden states and a sentence's vector.

    Attributes:
        folder: Where the encoder's checkpoint lies.
        pooling: Modes, their vectors laid one behind the other.
        normalize: Whether vectors are scaled to length 1.
        max_tokens: Tokens that a text is cut at; None leaves it to the encoder.
        lower: Whether texts are lower-cased first.
        source: What says so.
    """

    folder: Path
    pooling: tuple[PoolingMode, ...] = ("mean",)
    normalize: bool = False
    max_tokens: int | None = None
    lower: bool = False
    source: str = "no modules.json: mean of the tokens, not normalised"


def sentence_settings(path: str | PathLike[str]) -> SentenceSettings:
    """Read the settings of a folder; a plain encoder's checkpoint gets the mean of its tokens.

    Args:
        path: The folder, or a hub id that is in the local cache.
    Raises:
        CheckpointError: there is no such folder.
        BadConfig: a file is unreadable, or names a module that this version does not compute.
    """
    root = locate(path, None)
    modules_file = root / "modules.json"
    if not modules_file.is_file():
        tokens, lower = _length(root)
        return SentenceSettings(root, max_tokens=tokens, lower=lower)
    _refuse_prompts(root / "config_sentence_transformers.json")
    modules = read_json(modules_file).content
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise BadConfig(str(modules_file), "is not a list of modules")
    kinds = [_kind(module, modules_file) for module in modules]
    if kinds not in (_CHAIN, _CHAIN[:-1]):
        listed = ", ".join(kinds) or "no module"
        raise BadConfig(
            str(modules_file),
            f"lists {listed}; this version computes {', '.join(_CHAIN[:-1])} and perhaps {_CHAIN[-1]}",
        )
    folder, pooling = (_inside(root, module.get("path", ""), modules_file) for module in modules[:2])
    tokens, lower = _length(folder)
    modes = _pooling(pooling / "config.json")
    return SentenceSettings(folder, modes, kinds == _CHAIN, tokens, lower, "modules.json")


def _kind(module: Mapping[str, Any], where: Path) -> str:
    """Return the class of a module of sentence-transformers; raise BadConfig if it is somebody else's."""
    kind = str(module.get("type", ""))
    package, _, name = kind.rpartition(".")
    if package.partition(".")[0] != "sentence_transformers" or name not in _CHAIN:
        raise BadConfig(
            str(where),
            f"names the module {kind!r}; this version computes those of sentence_transformers called {', '.join(_CHAIN)}",
        )
    return name


def _refuse_prompts(file: Path) -> None:
    """Raise BadConfig if texts have a prompt put in front of them by default, which this version does not do."""
    config = read_json(file).content if file.is_file() else {}
    if isinstance(config, dict) and config.get("default_prompt_name"):
        raise BadConfig(
            str(file), f"puts the prompt {config['default_prompt_name']!r} before every text; this version does not"
        )


def _inside(root: Path, path: object, where: Path) -> Path:
    if isinstance(path, str) and "\0" not in path:
        steps = path.replace("\\", "/").split("/")
        if ".." not in steps and (path == "" or steps[0]):
            return root / path
    raise BadConfig(str(where), f"names the folder {path!r}, which does not lie in the checkpoint")


def _pooling(file: Path) -> tuple[PoolingMode, ...]:
    config = read_json(file).content
    if not isinstance(config, dict):
        raise BadConfig(str(file), "is not an object")
    on = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    unknown = [key for key in on if key not in _MODES]
    if unknown:
        raise BadConfig(
            str(file), f"asks for {', '.join(unknown)}; this version pools by {', '.join(get_args(PoolingMode))}"
        )
    modes = tuple(mode for key, mode in _MODES.items() if key in on)
    if not modes:
        raise BadConfig(str(file), "turns no pooling mode on")
    return modes


def _length(folder: Path) -> tuple[int | None, bool]:
    for name in _LENGTH_FILES:
        file = folder / name
        if not file.is_file():
            continue
        config = read_json(file).content
        if not isinstance(config, dict):
            raise BadConfig(str(file), "is not an object")
        tokens = config.get("max_seq_length")
        if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1):
            raise BadConfig(str(file), f"max_seq_length={tokens!r} is not a count of tokens")
        return tokens, config.get("do_lower_case") is True
    return None, False
