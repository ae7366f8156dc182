"""The parts a decoder layer is made of: linear, norm, rotary positions, attention, MLA, MLP, mixture of experts, KV cache.

Single-device arithmetic; a family file (../llama.py, ../deepseek_v3.py, …) composes them. A variant is another part, never a flag.
"""
