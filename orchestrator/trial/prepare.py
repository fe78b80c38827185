"""From raw data to the prepared rows of a sweep (see `orchestrator.trial.data` for what lies on the disk)."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import jinja2
import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from orchestrator.contract.config import ModelSource
from orchestrator.contract.facts import DataFacts, DataRequest
from orchestrator.contract.handoff import write_atomic
from orchestrator.trial.data import DESCRIPTION_FILE, HELD_OUT, TRAINING, RowFiles
from orchestrator.trial.formats import DataFormat, Row, Unrecognised, plain_text, recognise_all, texts, turns
from orchestrator.trial.sources import load_rows
from orchestrator.trial.tokenizer import TRAINED, load_tokenizer, padding_token_id, train_tokenizer
from orchestrator.trial.unusable import Unusable

TOKENIZER_FOLDER = "tokenizer"
_BATCH_ROWS = 1000

TokenRow = npt.NDArray[np.int32]


def prepare(request: DataRequest, model: ModelSource, vocab_size: int, directory: Path) -> DataFacts:
    """Tokenise the data that `request` names into `directory`, which is created. Raises Unusable.

    `vocab_size` is the number of rows of the model's embedding. A row ends with the tokenizer's end token, where it
    has one, and is cut at `sequence_length`. With packing, all rows are joined and cut into rows of exactly
    `sequence_length` tokens; a rest that fills no row is left out unless it is all there is. `eval_rows` of the rows
    are held out before: they are cut, never packed, and stored apart.
    """
    directory.mkdir(parents=True, exist_ok=True)
    raw, source = load_rows(request)
    data_format = recognise_all(raw, source)
    found = load_tokenizer(request.tokenizer, model)
    if found is None:
        rendered = texts(raw, source, lambda row: plain_text(row, data_format))
        tokenizer, name = train_tokenizer(rendered, vocab_size, directory / TOKENIZER_FOLDER), TRAINED
    else:
        tokenizer, name = found
        rendered = texts(raw, source, lambda row: _render(row, data_format, tokenizer))
    pad_token_id = padding_token_id(tokenizer, name)
    whole = _tokenise(rendered, tokenizer)
    if not whole:
        raise Unusable("data.path", f"{source}: no row has two tokens to learn from")
    _check_vocabulary(whole, pad_token_id, vocab_size, name)
    training, held_out = hold_out(whole, request.eval_rows, request.sequence_length)
    truncated = 0 if request.packing else sum(len(row) > request.sequence_length for row in training)
    rows = _pack(training, request.sequence_length) if request.packing else _cut(training, request.sequence_length)
    eval_rows = _cut(held_out, request.sequence_length)
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    facts = DataFacts(
        directory=str(directory),
        digest=_digest(rows, eval_rows, pad_token_id, request),
        format=data_format,
        rows=len(rows),
        tokens=int(lengths.sum()),
        longest_row_tokens=int(lengths.max()),
        mean_row_tokens=float(lengths.mean()),
        median_row_tokens=float(np.median(lengths)),
        truncated_rows=truncated,
        eval_rows=len(eval_rows),
        eval_tokens=sum(len(row) for row in eval_rows),
        vocab_size=len(tokenizer),
        pad_token_id=pad_token_id,
        tokenizer=name,
    )
    write_rows(directory, rows, facts, eval_rows)
    return facts


def hold_out(rows: list[TokenRow], count: int, sequence_length: int) -> tuple[list[TokenRow], list[TokenRow]]:
    """The rows to train on, and `count` unlike rows whose first `sequence_length` tokens are none of theirs.

    Raises Unusable when there are too few. Which ones follows from the rows' content alone, not from their order. One
    row of the greatest length stays, since the memory probe runs it.
    """
    if not count:
        return rows, []
    keys = [hashlib.sha256(row[:sequence_length].tobytes()).digest() for row in rows]
    by_content = dict(zip(keys, rows, strict=True))
    longest = max(by_content, key=lambda key: (min(len(by_content[key]), sequence_length), key))
    chosen = sorted(by_content.keys() - {longest})[:count]
    if len(chosen) < count:
        raise Unusable(
            "measure.quality.eval_rows",
            f"{count} rows are to be held out, but the data has only {len(by_content)} unlike rows and some must be"
            " left to train on; hold out fewer or bring more data",
        )
    taken = set(chosen)
    return [row for key, row in zip(keys, rows, strict=True) if key not in taken], [by_content[key] for key in chosen]


def write_rows(directory: Path, rows: list[TokenRow], facts: DataFacts, eval_rows: Sequence[TokenRow] = ()) -> None:
    """Store prepared rows; the description last, so that a folder with one is whole."""
    _write_tokens(directory, rows, TRAINING)
    if eval_rows:
        _write_tokens(directory, eval_rows, HELD_OUT)
    write_atomic(directory / DESCRIPTION_FILE, facts.model_dump_json(indent=1))


def _write_tokens(directory: Path, rows: Sequence[TokenRow], files: RowFiles) -> None:
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    write_atomic(directory / files.tokens, np.concatenate(rows).astype(np.int32).tobytes())
    write_atomic(directory / files.offsets, offsets.tobytes())


def _render(row: Row, data_format: DataFormat, tokenizer: PreTrainedTokenizerBase) -> str:
    if data_format in ("alpaca", "text") or not tokenizer.chat_template:
        return plain_text(row, data_format)
    try:
        return str(tokenizer.apply_chat_template(turns(row, data_format), tokenize=False))
    except jinja2.TemplateError as error:
        raise Unrecognised(f"does not fit the tokenizer's chat template: {error}") from error


def _tokenise(rendered: list[str], tokenizer: PreTrainedTokenizerBase) -> list[TokenRow]:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    rows = []
    for start in range(0, len(rendered), _BATCH_ROWS):
        encoded = tokenizer(rendered[start : start + _BATCH_ROWS], verbose=False)["input_ids"]
        rows += [np.array(ids if ids[-1:] == end else ids + end, dtype=np.int32) for ids in encoded]
    # a single token predicts nothing: its loss would be the mean over no label
    return [row for row in rows if len(row) > 1]


def _check_vocabulary(rows: list[TokenRow], pad_token_id: int, vocab_size: int, name: str) -> None:
    highest = max(pad_token_id, max(int(row.max()) for row in rows))
    if highest >= vocab_size:
        what = "pad token" if highest == pad_token_id else "token"
        raise Unusable(
            "data.tokenizer",
            f"the {what} {highest} of the tokenizer {name} lies beyond the {vocab_size} rows of the model's embedding;"
            " use the model's own tokenizer or a model whose vocab_size holds it",
        )


def _cut(rows: list[TokenRow], sequence_length: int) -> list[TokenRow]:
    return [row[:sequence_length] for row in rows]


def _pack(rows: list[TokenRow], sequence_length: int) -> list[TokenRow]:
    joined = np.concatenate(rows)
    count = len(joined) // sequence_length
    return list(joined[: count * sequence_length].reshape(count, sequence_length)) if count else [joined]


def _digest(rows: list[TokenRow], eval_rows: list[TokenRow], pad_token_id: int, request: DataRequest) -> str:
    """16 hex digits over what a trial sees: tokens, lengths, padding, how rows were cut, and rows that are held out."""
    content = hashlib.sha256()
    for part in (rows, eval_rows) if eval_rows else (rows,):
        for row in part:
            content.update(row.tobytes())
        content.update(np.array([len(row) for row in part], dtype=np.int64).tobytes())
    content.update(f"{pad_token_id} {request.sequence_length} {request.packing}".encode())
    return content.hexdigest()[:16]
