"""The tokenizer of a sweep: the one that is named, the model's own, or one trained from the data."""

from collections.abc import Sequence
from itertools import accumulate, takewhile
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from orchestrator.contract.config import ModelSource
from orchestrator.trial.unusable import Unusable

TRAINED = "trained from the data"
PAD, END = "<pad>", "<eos>"
TRAINING_CHARACTERS = 20_000_000
"""Merges hardly change beyond this much text."""
_OWN_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_SMALLEST_VOCABULARY = 256 + 2


def load_tokenizer(name: str | None, model: ModelSource) -> tuple[PreTrainedTokenizerBase, str] | None:
    """The tokenizer called `name`, else the model's own, and where it came from; None: it has to be trained.

    Raises Unusable when the one that is asked for cannot be loaded.
    """
    if name is not None:
        return _load(name, None, "data.tokenizer"), name
    if model.id is not None:
        return _load(model.id, model.revision, "data.tokenizer"), model.id
    if model.path is not None:
        folder = Path(model.path) if Path(model.path).is_dir() else Path(model.path).parent
        if any((folder / each).exists() for each in _OWN_FILES):
            return _load(str(folder), None, "data.tokenizer"), str(folder)
    return None


def _load(name: str, revision: str | None, field: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        lines = str(error).strip().splitlines()
        raise Unusable(field, f"the tokenizer {name} cannot be loaded: {lines[0] if lines else error}") from error


def train_tokenizer(texts: Sequence[str], vocab_size: int, directory: Path) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens, saved to `directory`.

    Raises Unusable when the model's vocabulary cannot hold the 256 bytes and two special tokens.
    """
    if vocab_size < _SMALLEST_VOCABULARY:
        raise Unusable(
            "data.tokenizer",
            f"the model's vocabulary of {vocab_size} is too small to train a tokenizer for it, which takes at least"
            f" {_SMALLEST_VOCABULARY}; name one with data.tokenizer",
        )
    sizes = accumulate(len(text) for text in texts)
    count = sum(1 for _ in takewhile(lambda size: size <= TRAINING_CHARACTERS, sizes))
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        texts[: max(1, count)], vocab_size=vocab_size, special_tokens=[PAD, END], show_progress=False
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, pad_token=PAD, eos_token=END)
    tokenizer.save_pretrained(directory)
    return tokenizer


def padding_token_id(tokenizer: PreTrainedTokenizerBase, name: str) -> int:
    """The id to pad with: the pad token, or the end token where there is none. Raises Unusable without either.

    No token is added for it: an id beyond the model's rows fails in the embedding.
    """
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    raise Unusable("data.tokenizer", f"the tokenizer {name} has neither a pad token nor an end token to pad with")
