"""python read.py TASK.json: llama.cpp's logits and tokens, in the virtual environment that has llama-cpp-python.

TASK: model, and either ids (logits at every position go to `out`, .npy) with lora, or texts (their ids go to
`out`, .json). Flash attention rounds to float16 and is off; so are the special buffers for AMX, which a virtual
machine may not have although its processor does.
"""

import ctypes
import json
import sys
from pathlib import Path

import llama_cpp as lib
import numpy as np

lib.llama_backend_init()
task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
settings = lib.llama_model_default_params()
settings.n_gpu_layers, settings.use_extra_bufts = 0, False
settings.vocab_only = "texts" in task
model = lib.llama_model_load_from_file(task["model"].encode(), settings)
assert model, "llama.cpp does not load the file"
vocab = lib.llama_model_get_vocab(model)

if "texts" in task:
    ids = []
    for text in task["texts"]:
        content = text.encode()
        room = (lib.llama_token * (len(content) + 8))()
        count = lib.llama_tokenize(vocab, content, len(content), room, len(room), False, False)
        assert count >= 0, text
        ids.append(room[:count])
    Path(task["out"]).write_text(json.dumps(ids), encoding="utf-8")
    sys.exit()

settings = lib.llama_context_default_params()
settings.n_ctx = settings.n_batch = 256
settings.n_threads = settings.n_threads_batch = 1
settings.type_k = settings.type_v = 0  # float32
settings.flash_attn_type = 0
context = lib.llama_init_from_model(model, settings)
if task.get("lora"):
    adapter = lib.llama_adapter_lora_init(model, task["lora"].encode())
    assert adapter, "llama.cpp does not load the adapter"
    adapters = (lib.llama_adapter_lora_p_ctypes * 1)(adapter)
    assert lib.llama_set_adapters_lora(context, adapters, 1, (ctypes.c_float * 1)(1.0)) == 0
ids = task["ids"]
batch = lib.llama_batch_init(len(ids), 0, 1)
batch.n_tokens = len(ids)
for place, id in enumerate(ids):
    batch.token[place], batch.pos[place], batch.logits[place] = id, place, 1
    batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
assert lib.llama_decode(context, batch) == 0
width = lib.llama_vocab_n_tokens(vocab)
rows = [
    np.ctypeslib.as_array(lib.llama_get_logits_ith(context, place), shape=(width,)).copy()
    for place in range(len(ids))
]
np.save(task["out"], np.stack(rows))
