"""The words of other tools, answered with ours.

The tools: axolotl, LLaMA-Factory, TRL and the Hugging Face Trainer, Unsloth, torchtune.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from unfreeze.core.errors import nearest

_FIELDS = """
model | a folder or org/name | base_model model_name model_name_or_path model_id
    pretrained_model_name_or_path
data | one or more files | dataset datasets dataset_name dataset_path train_file train_data data_path
validation_fraction | a share, 0 to 1 | val_set_size eval_split validation_split test_size
validation | a file | eval_file validation_file eval_dataset
out | the run's folder | output_dir output run_dir save_dir
epochs | passes over the data | num_epochs num_train_epochs epoch n_epochs
steps | optimizer steps | max_steps num_steps max_iters total_steps train_steps
learning_rate | at its peak | lr max_lr base_lr peak_lr
schedule | cosine, linear, constant or wsd | lr_scheduler lr_scheduler_type scheduler
warmup | a share of the steps, 0.03 for 3 % | warmup_ratio warmup_steps lr_warmup
weight_decay | per unit of learning rate | wd
clip | the global norm; 0: none | max_grad_norm gradient_clipping grad_clip clip_grad_norm
tokens_per_step | tokens of one optimizer step, all micro-batches together: about rows x their mean length |
    batch_size per_device_train_batch_size per_device_batch_size train_batch_size device_batch_size
    global_batch_size total_batch_size
micro_batches | a count of parts: tokens_per_step is cut into so many, each of whole documents |
    micro_batch_size gradient_accumulation_steps grad_accum accumulation_steps
sequence_length | tokens | max_seq_length max_seq_len sequence_len max_length cutoff_len seq_len block_size
    context_length model_max_length
packing | none, first_fit or best_fit | sample_packing pack
lora.rank | columns of B | r lora_r lora_rank adapter_rank
lora.alpha | the numerator of the scale alpha / rank | lora_alpha
lora.targets | groups, names or globs | lora_target lora_target_modules target_modules
lora.scaling | alpha/sqrt(r) | use_rslora rslora
train | adapters or all | finetuning_type full_finetuning
adapter | a run's or an adapter's folder, trained on | lora_model_dir adapter_name_or_path adapter_path
dtype | bfloat16 or float32 | bf16 fp16 torch_dtype precision compute_dtype
recompute | auto, layers, selective, elementwise or nothing | gradient_checkpointing activation_checkpointing
    use_gradient_checkpointing
optimizer_moments | AdamW's moments: float32 or int8 | optim optimizer adam_8bit
threads | CPU threads | num_threads num_workers
save_every | steps | save_steps save_interval checkpoint_every
keep_saves | how many | save_total_limit max_checkpoints
validate_every | steps | eval_steps eval_every eval_interval val_every
early_stop | validations without gain | early_stopping early_stopping_patience patience
track | tensorboard, wandb or trackio | report_to logger log_with use_wandb
seed | a whole number | random_seed data_seed
turns | only the assistant's turns are ever taught | train_on_inputs completion_only_loss
    assistant_only_loss
teacher | a checkpoint, a run, base, or what --prepare wrote | teacher_model teacher_model_name_or_path
    teacher_model_path
alpha | the share of cross entropy, 0 to 1 | kd_alpha cross_entropy_weight kd_ratio
temperature | of both softmaxes | kd_temperature
loss | dpo, ipo, kto, simpo or orpo | loss_type pref_loss rl
beta | of the loss that compares answers | pref_beta dpo_beta kto_beta rl_beta orpo_alpha cpo_beta
gamma | a margin of rewards; TRL's simpo_gamma | simpo_gamma
label_smoothing | a share of the pairs | dpo_label_smoothing
reference | live, or cached: asked once before the first step | precompute_ref_log_probs
    precompute_reference_logps
nll | the weight of fine-tuning on the chosen answer | rpo_alpha cpo_alpha pref_ftx sft_weight loss_weights
desirable_weight | a factor | kto_desirable_weight kto_chosen_weight
undesirable_weight | a factor | kto_undesirable_weight kto_rejected_weight
"""
_NOT_HERE = """
ref_model reference_model reference_free sync_ref_model | unfreeze prefer compares
    with the model as it began, which takes no second copy beside adapters; --loss simpo and orpo need none
load_in_4bit load_in_8bit quantization_bit bnb_4bit_quant_type | files that are 4-bit stay 4-bit, without a
    flag; others cannot be quantized here yet
"""
_COMMANDS = """
train finetune fine-tune tune lora qlora | unfreeze sft --model MODEL --data chat.jsonl
dpo ipo orpo simpo cpo preference | unfreeze prefer --model MODEL --data pairs.jsonl compares them
kto | unfreeze prefer --loss kto --model MODEL --data FILE learns from them
reward | models of rewards are not built; unfreeze prefer learns from pairs of answers
grpo ppo rl rlhf gspo | reinforcement learning is not built; sft on answers you kept is the shortest way
    today
distillation kd gkd teach | unfreeze distill --model MODEL --teacher DIR_OR_RUN --data chat.jsonl
merge-lora fuse bake merge-adapter | unfreeze merge RUN --to bf16
quantize gguf convert | not built alone; unfreeze merge RUN --to int4 packs what it merges, and llama.cpp
    converts what unfreeze merge RUN --to bf16 writes
serve server api | not built; unfreeze chat RUN talks in the terminal, unfreeze export RUN writes adapters
    that vLLM and SGLang read
eval evaluate lm-eval perplexity | unfreeze sft … --validation FILE measures held-out loss; other
    evaluations are not built
push upload push-to-hub | unfreeze export RUN --for peft --push org/name --base-id org/base
new config wizard | unfreeze init MODEL DATA writes a run.toml with its reasons
download fetch pull | unfreeze inspect org/name downloads what it reads; training downloads the rest
infer inference run talk | unfreeze chat MODEL_OR_RUN
preprocess prepare tokenize | unfreeze data show FILE --model MODEL; training encodes by itself
sweep search | unfreeze sft … --sweep learning_rate=1e-4,2e-4 runs and compares each combination
resume continue | give the same command again: a run goes on where it stopped
"""


def _rows(table: str) -> list[list[str]]:
    """Lines of cells; an indented line goes on with the one before."""
    joined = table.strip().replace("\n    ", " ")
    return [[cell.strip() for cell in line.split("|")] for line in joined.splitlines()]


FIELDS = {word: (field, unit) for field, unit, words in _rows(_FIELDS) for word in words.split()}
"""A word elsewhere -> (our field, its unit or form)."""
NOT_HERE = {word: why for words, why in _rows(_NOT_HERE) for word in words.split()}
"""A word elsewhere for what no field here stands for -> why."""
COMMANDS = {word: way for words, way in _rows(_COMMANDS) for word in words.split()}
"""A command elsewhere -> the shortest way here today."""


def field_hint(
    word: str, known: Iterable[str], places: Mapping[str, str] | None = None, *, flag: bool = False
) -> str:
    """The end of an error about an unknown field: what it is called here, with its unit.

    Else the nearest known word; else nothing. `places` (flat name -> place in a table): it is named by its
    place.
    """
    plain = word.lstrip("-").replace("-", "_").lower()
    if plain in FIELDS:
        name, unit = FIELDS[plain]
        name = (places or {}).get(name, name)
        return f"; it is called {'--' + name.replace('_', '-') if flag else name} here ({unit})"
    return f"; {NOT_HERE[plain]}" if plain in NOT_HERE else nearest(word, known)


def command_hint(word: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown command."""
    plain = word.lower().replace("_", "-")
    near = nearest(word, known)
    if plain not in COMMANDS and not near:
        # the same letters in another order: trian is answered as train is
        plain = next((word for word in COMMANDS if sorted(word) == sorted(plain)), plain)
    return f"; {COMMANDS[plain]}" if plain in COMMANDS else near
