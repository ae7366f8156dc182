"""The parts of a decoder layer: linear, norm, rotary positions, attention, MLA, MLP, MoE, KV cache.

Single-device arithmetic; a family file (../llama.py, ../deepseek_v3.py, …) composes them. A variant is
another part, never a flag.
"""
