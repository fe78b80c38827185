import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from orchestrator.contract.config import ModelSource
from orchestrator.contract.facts import DataFacts, DataRequest
from orchestrator.trial.data import Rows
from orchestrator.trial.prepare import prepare
from orchestrator.trial.unusable import Unusable
from trial.rig import LLAMA

ALPACA = [
    {"instruction": "Add.", "input": "1 and 2", "output": "3"},
    {"instruction": "Greet.", "input": "", "output": "Good morning to all of you."},
]
CONVERSATIONS = [
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "tools": "[]"},
    {
        "conversations": [
            {"from": "human", "value": "Look it up"},
            {"from": "function_call", "value": '{"name": "find"}'},
            {"from": "observation", "value": "found"},
        ],
        "tools": "[]",
    },
]
MESSAGES = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}]
TEXT = [{"text": "one row of words"}, {"text": "and another one"}]


def ready(path: Path, directory: Path, vocab_size: int = 512, **request: Any) -> DataFacts:
    asked = DataRequest(path=str(path), **{"sequence_length": 64, **request})
    return prepare(asked, ModelSource(config=LLAMA), vocab_size, directory)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) if path.suffix == ".jsonl" else json.dumps(rows))
    return path


@pytest.mark.parametrize(
    ("rows", "data_format"),
    [(ALPACA, "alpaca"), (CONVERSATIONS, "conversations"), (MESSAGES, "messages"), (TEXT, "text")],
)
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_formats_are_recognised_by_content(
    tmp_path: Path, rows: list[dict[str, Any]], data_format: str, suffix: str
) -> None:
    facts = ready(write(tmp_path / f"rows{suffix}", rows), tmp_path / "out")
    assert (facts.format, facts.rows, facts.tokenizer) == (data_format, len(rows), "trained from the data")
    stored = Rows(tmp_path / "out")
    assert stored.lengths().sum() == facts.tokens
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out" / "tokenizer")
    assert len(tokenizer) <= 512
    words = tokenizer.decode(stored.row(0), skip_special_tokens=True)
    assert words.count("Hi") == (0 if data_format in ("alpaca", "text") else 1)
    assert stored.row(0)[-1] == tokenizer.eos_token_id


def test_tables_and_plain_text_are_read(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('instruction,input,output\n"Add.","1, 2",3 is it\n')
    assert ready(tmp_path / "rows.csv", tmp_path / "csv").format == "alpaca"
    (tmp_path / "paragraphs.txt").write_text("First line\nof a paragraph.\n\nThe second one.\n")
    assert ready(tmp_path / "paragraphs.txt", tmp_path / "paragraphs").rows == 2
    (tmp_path / "lines.txt").write_text("First line\nand the second\nand the third\n")
    assert ready(tmp_path / "lines.txt", tmp_path / "lines").rows == 3


def test_rows_are_cut_at_the_sequence_length_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.json", [{"text": "a b c " * 100}, {"text": "short"}])
    facts = ready(path, tmp_path / "out", sequence_length=16)
    assert (facts.longest_row_tokens, facts.truncated_rows) == (16, 1)


def test_packing_leaves_no_padding(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.json", [{"text": f"row {number} has some words"} for number in range(100)])
    loose = ready(path, tmp_path / "loose", sequence_length=64)
    packed = ready(path, tmp_path / "packed", sequence_length=64, packing=True)
    assert set(Rows(tmp_path / "packed").lengths().tolist()) == {64}
    assert loose.tokens - 64 < packed.tokens <= loose.tokens
    joined = np.concatenate([Rows(tmp_path / "loose").row(index) for index in range(loose.rows)])
    assert Rows(tmp_path / "packed").row(1).tolist() == joined[64:128].tolist()


def test_the_digest_follows_the_content(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.json", TEXT)
    first = ready(path, tmp_path / "a").digest
    assert ready(path, tmp_path / "b").digest == first
    assert ready(path, tmp_path / "c", sequence_length=4).digest != first
    assert ready(write(path, [*TEXT, {"text": "one more"}]), tmp_path / "d").digest != first


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.json", None, "does not exist"),
        ("empty.json", "", "is empty"),
        ("list.json", "[]", "holds no rows"),
        ("header.csv", "text\n", "holds no rows"),
        ("broken.json", '[{"text": "a"}, {"te', "cannot be read as json"),
        ("rows.xlsx", "x", "found .xlsx; expected files of .json"),
        ("odd.json", [{"a": 1, "b": 2}], "row 1 has a, b; expected alpaca"),
        ("gap.jsonl", [*ALPACA, {"instruction": "No answer."}], "row 3 has instruction; expected alpaca"),
        ("mixed.jsonl", [ALPACA[0], TEXT[0]], "row 1 is alpaca, row 2 is text"),
        ("role.json", [{"conversations": [{"from": "robot", "value": "x"}]}], "row 1 has a turn from 'robot'"),
        ("blank.json", [{"text": " "}, {"text": ""}], "holds no text: all 2 rows are empty"),
    ],
)
def test_data_that_cannot_be_used_is_refused_by_name(tmp_path: Path, name: str, content: Any, says: str) -> None:
    path = tmp_path / name
    if isinstance(content, str):
        path.write_text(content)
    elif content is not None:
        write(path, content)
    with pytest.raises(Unusable) as caught:
        ready(path, tmp_path / "out")
    assert caught.value.field == "data.path"
    assert str(path) in str(caught.value)
    assert says in str(caught.value)


def word_tokenizer(directory: Path, words: list[str], **special: str) -> str:
    vocabulary = {word: number for number, word in enumerate(words)}
    trained = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    trained.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=trained, unk_token=words[0], **special).save_pretrained(directory)
    return str(directory)


def test_a_tokenizer_without_a_pad_token_pads_with_its_end_token(tmp_path: Path) -> None:
    name = word_tokenizer(tmp_path / "tok", ["?", "</s>", "one", "row", "of", "words"], eos_token="</s>")
    facts = ready(write(tmp_path / "rows.json", TEXT), tmp_path / "out", vocab_size=6, tokenizer=name)
    assert facts.pad_token_id == 1
    assert Rows(tmp_path / "out").row(0).tolist() == [2, 3, 4, 5, 1]


def test_a_token_beyond_the_embedding_is_refused(tmp_path: Path) -> None:
    words = ["?", "</s>", "one", "row", "of", "words"]
    path = write(tmp_path / "rows.json", TEXT)
    name = word_tokenizer(tmp_path / "tok", [*words, "<pad>"], eos_token="</s>", pad_token="<pad>")
    with pytest.raises(Unusable, match=r"pad token 6 .* beyond the 6 rows of the model's embedding") as caught:
        ready(path, tmp_path / "out", vocab_size=6, tokenizer=name)
    assert caught.value.field == "data.tokenizer"
    with pytest.raises(Unusable, match="the token 5 "):
        ready(path, tmp_path / "out", vocab_size=5, tokenizer=word_tokenizer(tmp_path / "b", words, eos_token="</s>"))
    with pytest.raises(Unusable, match="neither a pad token nor an end token"):
        ready(path, tmp_path / "out", tokenizer=word_tokenizer(tmp_path / "c", words))


def test_a_vocabulary_too_small_to_train_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="vocabulary of 100 is too small"):
        ready(write(tmp_path / "rows.json", TEXT), tmp_path / "out", vocab_size=100)


def test_a_missing_tokenizer_names_itself(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    with pytest.raises(Unusable, match="nowhere cannot be loaded"):
        ready(write(tmp_path / "rows.json", TEXT), tmp_path / "out", tokenizer=missing)
