"""Texts from a loaded decoder: a prompt goes through once, then every token that the model writes.

On several ranks every rank calls the same methods with the same arguments. Each computes; the prompt and every token
are rank 0's, so that no rank can go another way.
"""

from __future__ import annotations

import operator
import os.path
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import distributed

from steelyard.collectives import is_initialized
from steelyard.errors import ConfigError, LoadError
from steelyard.loader import LoadedModel
from steelyard.sampling import BROKEN, GREEDY, Chooser, Sampling
from steelyard.texts import GenerationSettings, open_tokenizer, render_chat, require_rows

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

Stop: TypeAlias = Literal["eos", "length", "positions"]
"""Why a text ended: the model ended it, it has the tokens asked for, or the model has no more positions."""

UNFINISHED = "\ufffd"  # what a decoder puts where the bytes of a character are missing


@runtime_checkable
class TextModel(Protocol):
    """What a decoder's module offers.

    Attributes:
        max_positions: Tokens that a prompt and its continuation may have.
        vocabulary: Tokens of the model.
        has_head: Whether it makes logits; one without cannot write.
    """

    max_positions: int
    vocabulary: int
    has_head: bool

    def new_cache(self, batch: int, tokens: int) -> Any:
        """Return an empty cache of keys and values for so many texts of so many tokens."""
        ...

    def __call__(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        keep: int = 0,
    ) -> Tensor:
        """Return logits (B, T, V), or of the last ``keep`` tokens only; with a cache, tokens go behind those in it."""
        ...


@dataclass(frozen=True, slots=True)
class Generation:
    """What a model wrote.

    Attributes:
        text: The continuation, without the token that ended it.
        ids: Every token of it, with that token.
        prompt_tokens: Tokens of the prompt.
        stop: Why it ended.
        prefill_seconds: Seconds until the first token was chosen.
        decode_seconds: Seconds for the others; what a reader of the stream does between two is not counted.
    """

    text: str
    ids: tuple[int, ...]
    prompt_tokens: int
    stop: Stop
    prefill_seconds: float
    decode_seconds: float

    @property
    def new_tokens(self) -> int:
        """Number of tokens written."""
        return len(self.ids)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second behind the first; None if there is no second token."""
        return (len(self.ids) - 1) / self.decode_seconds if len(self.ids) > 1 else None


class TextGenerator:
    """Continues texts.

    Args:
        model: A loaded decoder with a head.
        settings: What its folder says about texts.

    Raises:
        CheckpointError: the folder has no ``tokenizer.json``, or one of another model.
        ConfigError: the model does not write texts.
    """

    def __init__(self, model: LoadedModel, settings: GenerationSettings) -> None:
        self.settings = settings
        key, module = model.plan.family_key, model.module
        self.module = _writer(key, module)
        self._device = next(iter(module.parameters())).device
        self._tokenizer = open_tokenizer(settings.folder)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        require_rows(self._tokenizer, settings.folder, self.module.vocabulary)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text.

        Args:
            text: The text.
            special: Whether the tokenizer adds the special tokens that it puts around a text; false where they are
                written in it already.
        Raises:
            ConfigError: the text has half a character, as a terminal passes bytes that are not UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the text is not Unicode at character {error.start}: {error.reason}") from error
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a chat up to where the answer begins, as the folder's chat template writes it.

        Raises:
            CheckpointError: as `steelyard.texts.render_chat`.
            ConfigError: likewise.
        """
        return self.encode(render_chat(self.settings.folder, messages), special=False)

    def stream(
        self, prompt: str | Sequence[int], *, max_new_tokens: int = 64, sampling: Sampling = GREEDY
    ) -> Generator[str, None, Generation]:
        """Check what is asked for, and return the continuation piece by piece.

        A piece comes when its last character is whole; together they are the text. Special tokens have no text.

        Args:
            prompt: A text, or its tokens; an empty one begins with the folder's ``bos_token_id``.
            max_new_tokens: Most tokens to write; fewer are written if the model has no more positions.
            sampling: How each is chosen.
        Returns:
            The pieces; the generator's own return value is the whole.
        Raises:
            ConfigError: the prompt is empty and no token begins a text, or it is longer than the model's positions;
                or a value is out of its range.
            LoadError: while it runs: the model's logits are not finite.
        """
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={max_new_tokens!r} is no number of tokens above 0")
        ids = self._ids_of_first_rank(self._prompt(prompt))
        room = self.module.max_positions - len(ids)
        if room < 0:
            raise ConfigError(
                f"the prompt has {len(ids)} tokens, and the model takes {self.module.max_positions}, "
                "the continuation included; give a shorter prompt"
            )
        return self._write(ids, min(max_new_tokens, room), "positions" if room < max_new_tokens else "length", sampling)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 64,
        sampling: Sampling = GREEDY,
        on_text: Callable[[str], object] | None = None,
    ) -> Generation:
        """Return the whole continuation.

        Args:
            prompt: As `stream` takes it.
            max_new_tokens: Likewise.
            sampling: Likewise.
            on_text: Called with each piece as it comes.
        Raises:
            ConfigError: as `stream`.
            LoadError: as `stream`.
        """
        pieces = self.stream(prompt, max_new_tokens=max_new_tokens, sampling=sampling)
        while True:
            try:
                piece = next(pieces)
            except StopIteration as end:
                made: Generation = end.value
                return made
            if on_text is not None:
                on_text(piece)

    def _prompt(self, prompt: str | Sequence[int]) -> list[int]:
        ids = self.encode(prompt) if isinstance(prompt, str) else [operator.index(one) for one in prompt]
        if not ids:
            if self.settings.bos is None:
                raise ConfigError(
                    f"the prompt is empty, and {self.settings.folder} names no bos_token_id to begin a text with"
                )
            ids = [self.settings.bos]
        outside = [one for one in ids if not 0 <= one < self.module.vocabulary]
        if outside:
            raise ConfigError(
                f"the prompt has the token {outside[0]}, which is none of the model's {self.module.vocabulary}"
            )
        return ids

    def _write(
        self, prompt: Sequence[int], most: int, at_most: Stop, sampling: Sampling
    ) -> Generator[str, None, Generation]:
        """Yield the pieces of at most ``most`` tokens; ``at_most`` is why there are not more."""
        chooser, text, fed = Chooser(sampling), TextWindow(self._tokenizer, prompt), prompt
        pieces: list[str] = []
        ids: list[int] = []
        seconds = [0.0, 0.0]
        stop: Stop = at_most
        cache = None
        while len(ids) < most:
            started = time.perf_counter()
            if cache is None:
                cache = self.module.new_cache(1, len(prompt) + most)
            token = self._step(fed, cache, chooser)
            seconds[bool(ids)] += time.perf_counter() - started
            ids.append(token)
            if token in self.settings.eos:
                stop = "eos"
                break
            fed = [token]
            piece = text.add(token)
            if piece:
                pieces.append(piece)
                yield piece
        rest = text.rest()
        if rest:
            pieces.append(rest)
            yield rest
        return Generation("".join(pieces), tuple(ids), len(prompt), stop, *seconds)

    @torch.inference_mode()
    def _step(self, ids: Sequence[int], cache: Any, chooser: Chooser) -> int:
        """Return the token behind those fed."""
        logits = self.module(torch.tensor([list(ids)], device=self._device), cache=cache, keep=1)
        token = int(_of_first_rank(chooser.choose(logits[0, -1])).item())
        if token == BROKEN:
            raise LoadError(
                "the model's logits are not finite, so no token can be chosen: a weight is damaged, or the values do "
                "not fit its dtype; load it with dtype='float32' to tell which"
            )
        return token

    def _ids_of_first_rank(self, ids: list[int]) -> list[int]:
        """Return rank 0's tokens, whose number may differ from this rank's."""
        count = int(_of_first_rank(torch.tensor(len(ids), device=self._device)).item())
        own = torch.tensor((ids + [0] * count)[:count], device=self._device)
        return [int(one) for one in _of_first_rank(own).tolist()]


def _writer(key: str, module: object) -> TextModel:
    if not isinstance(module, TextModel):
        raise ConfigError(f"{key} does not write texts: its module makes no logits one token at a time")
    if not module.has_head:
        raise ConfigError(f"{key} cannot write texts: it has no head; load the checkpoint of its causal language model")
    return module


def _of_first_rank(values: Tensor) -> Tensor:
    """Return rank 0's values on every rank; kernels, draws, clocks and stdin of ranks may differ, what follows may not.

    Shapes:
        values: any, equal on all ranks -> the same
    """
    if is_initialized() and distributed.get_world_size() > 1:
        distributed.broadcast(values, src=0)
    return values


class TextWindow:
    """Turns tokens into text one by one, so that the pieces together are the text of all.

    A window of tokens is decoded without the newest ones and with them; the piece is what comes on top. The window
    begins with the tokens of the piece before, at first with the prompt: a decoder that drops the space in front of a
    text drops it from both. A piece is held back while its last character lacks bytes.

    Args:
        tokenizer: What decodes.
        prompt: Tokens that stand before.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt)
        self._known = len(self._window)  # tokens of the window whose text is out
        self._before = self._decode(self._window)

    def add(self, token: int) -> str:
        """Return the text that a token completes; often none."""
        self._window.append(token)
        return self._piece(held=True)

    def rest(self) -> str:
        """Return what is held back, with a mark in place of a character whose bytes never came."""
        return self._piece(held=False)

    def _piece(self, *, held: bool) -> str:
        text = self._decode(self._window)
        if held and text.endswith(UNFINISHED):
            return ""
        # What they share, not all that was known: the prompt's last character may be finished by the continuation.
        piece = text[len(os.path.commonprefix([self._before, text])) :]
        if piece:
            if not self._before.endswith(UNFINISHED):  # a window does not begin inside a character
                del self._window[: self._known]
            self._known = len(self._window)
            self._before = self._decode(self._window)
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)
