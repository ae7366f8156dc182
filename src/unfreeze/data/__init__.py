"""L2, data: files to rows, text to ids, conversations to tokens with a mask, tokens to packed batches."""

from unfreeze.data.dataset import Dataset, Stats, encode_file
from unfreeze.data.masks import encode_chat, encode_prompt, encode_row, encode_text
from unfreeze.data.packing import Batches, Cursor, Example, pack
from unfreeze.data.sources import BadRow, Conversation, Row, Text, read_rows
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
    "Example",
    "Row",
    "Stats",
    "Text",
    "Tokenizer",
    "VocabSpec",
    "check_vocab",
    "encode_chat",
    "encode_file",
    "encode_prompt",
    "encode_row",
    "encode_text",
    "has_tokenizer",
    "load_tokenizer",
    "pack",
    "read_rows",
]
