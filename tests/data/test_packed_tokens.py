import pickle
import tempfile
from pathlib import Path

import numpy
import pytest
import torch

from optimized.data.packed_tokens import PackedTokens
from perfsuite import Pair, PerfsuiteError, Workload, integers, scalar, side, size, stateful, tensor
from reference.data.packed_tokens import TokenSequences
from suite import packed_text
from suite.text import encode, trained


def library():
    try:
        import tokenizers  # noqa: F401
    except ModuleNotFoundError:
        return "tokenizers is not installed; pip install 'perfsuite[train]'"
    return None


def from_a_pack(texts, tokenizer, length):
    with tempfile.TemporaryDirectory() as folder:
        rows = list(encode(tokenizer, texts))
        ends = numpy.cumsum([len(row) for row in rows])
        vocabulary = tokenizer.get_vocab_size()
        packed_text.write(Path(folder), numpy.concatenate(rows), ends, tokenizer.to_str(), vocabulary, {"recipe": "r"})
        sequences = PackedTokens(folder, length)
        assert sequences.pack.row is not None  # maps the file, so the mapping outlives the folder
        return sequences


MADE = {TokenSequences: TokenSequences, PackedTokens: from_a_pack}


def batches(sequences):
    """Return a side whose step returns the batch of the sequences `rows`, modulo their count."""

    def make(letters, rows, length):
        texts = bytes(letters.tolist()).decode().split("~")
        # With so few merges even a text of one repeated letter has enough tokens.
        tokenizer = trained(texts, 258 + len(letters) // 64)
        count = (sum(map(len, encode(tokenizer, texts))) - 1) // length
        made = MADE[sequences](texts, tokenizer, length)
        return lambda: made.batch(rows % count)

    return make


packed_tokens = Pair(
    reference=stateful(side(batches(TokenSequences), available=library)),
    optimized=stateful(side(batches(PackedTokens), available=library)),
    inputs={
        "letters": tensor("N", dtype="int64", values=integers(32, 126)),
        "rows": tensor("B", dtype="int64", values=integers(0, 9)),
        "length": scalar(integers(1, 3)),
    },
    sizes={"N": size(60, 90), "B": size(0, 5)},
    gradients=False,
    steps=(1, 2),
    workloads=[
        Workload("gpu", N=200000, B=4, length=4096, clock="wall", speedup=50, device="cuda"),
        Workload("cpu", N=20000, B=4, length=256, clock="wall", device="cpu"),
    ],
)


@pytest.fixture
def pack(tmp_path):
    packed_text.write(tmp_path, numpy.arange(21) + 65500, numpy.array([21]), "{}", 65536, {"recipe": "r"})
    return tmp_path


def test_batch_rows_equal_the_single_examples(pack):
    sequences = PackedTokens(pack, 6)
    assert len(sequences) == 3
    inputs, labels = sequences.batch(torch.tensor([2, 0]))
    assert inputs.dtype == labels.dtype == torch.int64
    for place, row in enumerate((2, 0)):
        own, after = sequences[row]
        assert torch.equal(inputs[place], own)
        assert torch.equal(labels[place], after)
        assert own.tolist() == list(range(65500 + 6 * row, 65506 + 6 * row))
        assert after.tolist() == [t + 1 for t in own.tolist()]


def test_tokens_of_four_bytes_are_read_correctly(tmp_path):
    packed_text.write(tmp_path, numpy.array([70_000, 1, 2]), numpy.array([3]), "{}", 70_001, {"recipe": "r"})
    inputs, labels = PackedTokens(tmp_path, 2).batch(torch.tensor([0]))
    assert (inputs.tolist(), labels.tolist()) == ([[70_000, 1]], [[1, 2]])


def test_dataset_is_pickled_by_its_path(pack):
    sequences = PackedTokens(pack, 6)
    sent = pickle.dumps(sequences)
    assert len(sent) < 400
    assert torch.equal(pickle.loads(sent)[1][0], sequences[1][0])


def test_out_of_range_rows_and_lengths_raise_errors(pack):
    sequences = PackedTokens(pack, 6)
    with pytest.raises(IndexError, match="sequence 3 of 3"):
        sequences[3]
    with pytest.raises(PerfsuiteError, match="rows: 0 to 3 is out of range; there are 3"):
        sequences.batch(torch.tensor([3, 0]))
    with pytest.raises(PerfsuiteError, match="sequence_length: 21 and the token after are more than the 21 tokens"):
        PackedTokens(pack, 21)
