"""A checkpoint, or a base with an adapter, as one GGUF file for llama.cpp and Ollama.

families.py says what llama.cpp can hold, tensors.py names and turns the weights, weights.py reads them with
an adapter's ΔW, vocabulary.py writes the tokenizer, file.py the file. Formats: bf16, and q8_0 (blocks of 32
weights with one float16 scale).

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""
