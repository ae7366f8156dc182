"""L3, data: files to rows, text to ids, conversations to tokens with a mask, tokens to packed batches."""

from unfreeze.data.dataset import Dataset, Stats, encode_file, encode_files
from unfreeze.data.examples import Example, Examples
from unfreeze.data.masks import Encoder, encode_chat, encode_prompt
from unfreeze.data.order import Mixed, Shuffled
from unfreeze.data.packing import Batches, Cursor, pack
from unfreeze.data.sources import BadRow, Conversation, Row, Text, read_rows
from unfreeze.data.split import split_by_content, validation_batches
from unfreeze.data.templates import PLAIN_TEMPLATE, ChatTemplate
from unfreeze.data.tokenizer import Tokenizer, VocabSpec, check_vocab, has_tokenizer, load_tokenizer

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
    "Stats",
    "Text",
    "Tokenizer",
    "VocabSpec",
    "check_vocab",
    "encode_chat",
    "encode_file",
    "encode_files",
    "encode_prompt",
    "has_tokenizer",
    "load_tokenizer",
    "pack",
    "read_rows",
    "split_by_content",
    "validation_batches",
]
