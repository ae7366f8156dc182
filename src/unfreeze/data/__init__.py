"""L3, data: from files to packed batches in four folders, and a fifth that cleans files.

rows/      a file's row -> Row            a Conversation or a Text, checked field by field
tokens/    Row -> Examples                template -> text with trained spans marked -> tokens and weights
store/     Examples of all rows           encoded once, kept on disk, read in any order
packing/   Examples -> Source of steps    the order of an epoch, packing, the one shift of labels
clean/     files -> cleaned files         before any of this: filters, duplicates, a ledger

Before training, encode_files (store/dataset.py) reads all rows once on all cores: it counts them, checks them
and collects statistics. encoded_files (store/encoded.py) caches the result on disk for other processes and
the next start.
Training then reads from the outside in; each line is an iterator or a lookup over the one below it:

    Batches                  -> (micro-batches of a step, Cursor), endless               packing/batches.py
      order(epoch)           -> numbers of documents, a pure function of the seed     packing/order.py
      plan(epoch)            -> these numbers, cut into batches                       packing/batches.py
        Examples[number]     -> Example: from memory, disk, or its file read again    store/examples.py
          Again(place)       -> Row                                                   rows/files.py
          Encoder(row)       -> tokens and weights                                    tokens/masks.py
            Renderer(row)    -> text, split into context and trained spans            tokens/turns.py
      pack(examples)         -> Batch                                                 packing/batches.py

If the run has a number of steps, large files are read in windows, and training starts with the first window
(store/streamed.py, packing/windows.py).

A Cursor is (epoch, position) and whatever must be unchanged for it to be valid. All other state follows from
the seed.
Names are imported on first use: packed batches need torch.
"""

from typing import TYPE_CHECKING

from unfreeze.core.lazy import on_first_use

if TYPE_CHECKING:
    from unfreeze.data.packing.batches import Batches, pack
    from unfreeze.data.packing.order import Mixed, Shuffled
    from unfreeze.data.packing.source import Cursor, Source
    from unfreeze.data.packing.split import split_by_content, validation_batches
    from unfreeze.data.rows.files import read_rows
    from unfreeze.data.rows.row import BadRow, Conversation, Row, Text
    from unfreeze.data.store.dataset import Dataset, Stats, encode_file, encode_files
    from unfreeze.data.store.encoded import encoded_files
    from unfreeze.data.store.examples import Example, Examples
    from unfreeze.data.tokens.masks import Encoder, encode_chat, encode_prompt
    from unfreeze.data.tokens.templates import PLAIN_TEMPLATE, ChatTemplate
    from unfreeze.data.tokens.tokenizer import (
        Tokenizer,
        VocabSpec,
        check_vocab,
        has_tokenizer,
        load_tokenizer,
    )

__all__ = [
    "PLAIN_TEMPLATE",
    "BadRow",
    "Batches",
    "ChatTemplate",
    "Conversation",
    "Cursor",
    "Dataset",
    "Encoder",
    "Example",
    "Examples",
    "Mixed",
    "Row",
    "Shuffled",
    "Source",
    "Stats",
    "Text",
    "Tokenizer",
    "VocabSpec",
    "check_vocab",
    "encode_chat",
    "encode_file",
    "encode_files",
    "encode_prompt",
    "encoded_files",
    "has_tokenizer",
    "load_tokenizer",
    "pack",
    "read_rows",
    "split_by_content",
    "validation_batches",
]

__getattr__ = on_first_use(
    __name__,
    {
        **dict.fromkeys("Dataset Stats encode_file encode_files".split(), "unfreeze.data.store.dataset"),
        "encoded_files": "unfreeze.data.store.encoded",
        **dict.fromkeys("Example Examples".split(), "unfreeze.data.store.examples"),
        **dict.fromkeys("Encoder encode_chat encode_prompt".split(), "unfreeze.data.tokens.masks"),
        **dict.fromkeys("Mixed Shuffled".split(), "unfreeze.data.packing.order"),
        **dict.fromkeys("Batches pack".split(), "unfreeze.data.packing.batches"),
        **dict.fromkeys("Cursor Source".split(), "unfreeze.data.packing.source"),
        "read_rows": "unfreeze.data.rows.files",
        **dict.fromkeys("BadRow Conversation Row Text".split(), "unfreeze.data.rows.row"),
        **dict.fromkeys("split_by_content validation_batches".split(), "unfreeze.data.packing.split"),
        **dict.fromkeys("PLAIN_TEMPLATE ChatTemplate".split(), "unfreeze.data.tokens.templates"),
        **dict.fromkeys("Tokenizer VocabSpec check_vocab".split(), "unfreeze.data.tokens.tokenizer"),
        **dict.fromkeys("has_tokenizer load_tokenizer".split(), "unfreeze.data.tokens.tokenizer"),
    },
)
