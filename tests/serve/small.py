"""A small random Llama with a byte-level tokenizer and a template of Qwen's form, in transformers and in ours."""

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from unfreeze.serve.router import Router
from unfreeze.serve.running import Endpoint
from unfreeze.serve.session import Speech
from unfreeze.serve.speaker import Speaker

TEXT = [
    "the sun is a star",
    '{"name": "add", "arguments": {"a": 1}}',
    "two and two are four, 四是二加二。",
] * 3
SPECIAL = ["<|im_start|>", "<|im_end|>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TEMPLATE = """{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}{{ '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def write(folder):
    """-> transformers' model, whose checkpoint and tokenizer are in the folder."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXT, trainer)
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens(MARKS)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(fast), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=fast.eos_token_id,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)  # else every token is as likely
    model.save_pretrained(folder)
    return model


def serve(model, name="small", **options):
    """-> an endpoint of a loaded model."""
    speech = Speech(model.tokenizer, model.decoder.shape.max_positions)
    return Endpoint().serve(Router(Speaker(model.engine), model.tokenizer, name, speech, **options))
