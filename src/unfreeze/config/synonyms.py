"""Names used by other tools, with our names for them.

Tools: axolotl, LLaMA-Factory, TRL and the Hugging Face Trainer, Unsloth, torchtune.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from unfreeze.core.errors import nearest

_FIELDS = """
model | a folder or org/name | base_model model_name model_name_or_path model_id
    pretrained_model_name_or_path
data | one or more files | dataset datasets dataset_name dataset_path train_file train_data data_path
validation_fraction | a share, 0 to 1 | val_set_size eval_split validation_split test_size
validation | a file | eval_file validation_file eval_dataset
out | run folder | output_dir output run_dir save_dir
epochs | passes over the data | num_epochs num_train_epochs epoch n_epochs
steps | optimizer steps | max_steps num_steps max_iters total_steps train_steps
learning_rate | peak value | lr max_lr base_lr peak_lr
optimizer.schedule | cosine, linear, constant, wsd or one_cycle | lr_scheduler lr_scheduler_type scheduler
optimizer.warmup | a share of the steps, 0.03 for 3 % | warmup_ratio warmup_steps lr_warmup pct_start
optimizer.final | a share of the peak, 0.1 for a tenth | min_lr min_lr_ratio min_lr_rate
optimizer.weight_decay | per unit of learning rate | wd
optimizer.clip | limit of the global norm; 0: none | max_grad_norm gradient_clipping grad_clip clip_grad_norm
tokens_per_step | tokens per optimizer step: about rows x their mean length |
    batch_size per_device_train_batch_size per_device_batch_size train_batch_size device_batch_size
    global_batch_size total_batch_size
micro_batches | number of micro-batches per step | micro_batch_size
micro_batches | it splits a step; elsewhere it multiplies the batch |
    gradient_accumulation_steps grad_accum accumulation_steps
sequence_length | tokens | max_seq_length max_seq_len sequence_len max_length cutoff_len seq_len block_size
    context_length model_max_length
training.packing | none, first_fit or best_fit | sample_packing pack
rank | size of the adapters | r lora_r lora_rank adapter_rank
lora.alpha | the numerator of the scale alpha / rank | lora_alpha
lora.targets | groups, names or globs | lora_target lora_target_modules target_modules
lora.scaling | alpha/sqrt(r) | use_rslora rslora
lora.dora | true or false | use_dora dora
lora.start | lora, pissa, pissa_niter_4 or pissa_niter_16 | init_lora_weights pissa_init
train | adapters or all | finetuning_type full_finetuning use_peft use_lora
adapter | folder of the run or adapter to continue | lora_model_dir adapter_name_or_path adapter_path
dtype | auto, bfloat16 or float32 | bf16 fp16 fp32 torch_dtype precision compute_dtype
device | auto, cpu or cuda | use_cpu no_cuda gpu accelerator
place.recompute | auto, layers, selective, elementwise or nothing | gradient_checkpointing
    activation_checkpointing use_gradient_checkpointing
optimizer.moments | AdamW's moments: float32 or int8 | adam_8bit
optimizer.kind | adamw or muon | optim optimizer optimizer_name optimizer_type
muon.update_scale | match_rms_adamw or original | adjust_lr_fn
threads | CPU threads | num_threads num_workers
save_every | steps | save_steps save_interval checkpoint_every save_strategy
save.keep | number of saves | save_total_limit max_checkpoints
watch.validate_every | steps | eval_steps eval_interval val_every eval_strategy
    evaluation_strategy
watch.early_stop | validations without gain | early_stopping early_stopping_patience patience
    load_best_model_at_end
watch.track | tensorboard, wandb or trackio | report_to logger log_with use_wandb
seed | a whole number | random_seed data_seed
columns | FIELD=COLUMN, such as prompt=question | dataset_text_field text_column prompt_column
    response_column field_messages
teacher | a checkpoint, a run, base, or a folder from --prepare | teacher_model teacher_model_name_or_path
    teacher_model_path
alpha | share of cross entropy, 0 to 1 | kd_alpha cross_entropy_weight kd_ratio
temperature | temperature of both softmaxes | kd_temperature
loss | of prefer: dpo, ipo, kto, simpo or orpo; of grpo: ppo, cispo, gspo, dppo, sapo or rloo |
    loss_type pref_loss rl
preference.beta | beta of the preference loss | pref_beta dpo_beta kto_beta rl_beta orpo_alpha cpo_beta
preference.gamma | margin of rewards; TRL's simpo_gamma | simpo_gamma
preference.label_smoothing | share of the pairs | dpo_label_smoothing
preference.reference | live, or cached: computed once | precompute_ref_log_probs
    precompute_reference_logps
preference.nll | weight of cross entropy on the chosen answer | rpo_alpha cpo_alpha pref_ftx sft_weight
    loss_weights
preference.desirable_weight | a factor | kto_desirable_weight kto_chosen_weight
preference.undesirable_weight | a factor | kto_undesirable_weight kto_rejected_weight
reward | my.py, a file with a function reward | reward_funcs reward_func reward_function reward_fn
agent | my.py, a file with run(base_url, row) | agent_path rollout_function workflow
env | my.py:Class, an environment | environment environment_factory env_name
turns | turns | max_turns max_tool_calling_iterations num_turns
answers | answers to each prompt | num_generations group_size n_samples_per_prompt rollout_n
max_new_tokens | tokens | max_completion_length max_response_length response_length
prompts_per_step | prompts | rollout_batch_size prompts_per_batch
updates | optimizer steps on the same answers | num_iterations ppo_epochs
clip_low | the bound 1 - clip_low | clip_ratio_low eps_clip clip_ratio epsilon_low epsilon
clip_high | the bound 1 + clip_high | epsilon_high clip_ratio_high eps_clip_high
beta | weight of the KL | kl_coef kl_loss_coef init_kl_coef kl_beta
scale | group, batch or none | scale_rewards
"""
_NOT_HERE = """
ref_model reference_model reference_free sync_ref_model | prefer compares with the starting model; --loss
    simpo and orpo need none | unfreeze prefer --model MODEL --data pairs.jsonl
qlora load_in_4bit load_in_8bit quantization_bit bnb_4bit_quant_type bnb_4bit_compute_dtype | a 4-bit or 8-bit
    checkpoint is trained in its own format; a bf16 one is packed while it is loaded |
    --quantize nf4 (or int4, int8, fp8, mxfp4, nvfp4); or unfreeze quantize MODEL --to int4 --out DIR
resume_from_checkpoint resume auto_resume auto_resume_from_checkpoints overwrite_output_dir | the same command
    resumes its run; a new run has another --out | the same command without this
neftune_noise_alpha neftune | NEFTune is not built; TRL has it |
    trl sft --neftune_noise_alpha 5 --model_name_or_path MODEL --dataset_name DATA
lora_dropout | adapters have no dropout here; TRL has it |
    trl sft --use_peft --lora_dropout 0.05 --model_name_or_path MODEL --dataset_name DATA
flash_attn attn_implementation flash_attention use_flash_attention_2 use_liger use_liger_kernel liger
    enable_liger_kernel torch_compile compile unsloth use_unsloth | attention and kernels are chosen for the
    machine; each choice is listed | unfreeze kernels list
fsdp fsdp_config deepspeed ddp accelerate zero_stage zero2 zero3 gpus num_gpus n_gpus num_processes
    nproc_per_node | torchrun starts one process per GPU; --place.weights sharded shards trained weights |
    torchrun --nproc-per-node 8 -m unfreeze sft --model MODEL --data FILE
merge merge_adapter merge_lora merge_weights | a separate command merges a finished run |
    unfreeze merge RUN --to bf16
push_to_hub hub_model_id hub_token hub_private_repo | a finished run is uploaded by export |
    unfreeze export RUN --for peft --push org/name
chat_template chat_template_path template | the chat template is the model's own: chat_template.jinja in its
    folder | put the template there, then: unfreeze data show FILE --model MODEL
trust_remote_code | code from a checkpoint is never run; model families are built in | unfreeze inspect MODEL
logging_steps logging_strategy logging_dir log_every log_interval disable_tqdm | every step is recorded in
    RUN/events.jsonl; --watch.track tensorboard shows them elsewhere | unfreeze report RUN
add_tokens added_tokens num_new_tokens additional_special_tokens resize_vocab resize_embeddings
    resize_token_embeddings trainable_token_indices | tokens are added from a file, one per line |
    unfreeze sft --model MODEL --data FILE --new-tokens new.txt
modules_to_save | modules train fully beside the adapters by their names |
    unfreeze sft --model MODEL --data FILE --train-too norm,lm_head
embedding_lr embedding_learning_rate | one learning rate trains everything | leave it out
rope_theta rope_type yarn | the rotary table is that of the model's config.json; a scaling of it is a
    setting | --rope-scaling yarn --rope-factor 4
train_on_inputs completion_only_loss assistant_only_loss train_on_responses_only mask_prompt train_on_prompt |
    only answers are trained on; rows of text train every token |
    unfreeze data show FILE --model MODEL
max_samples max_train_samples num_samples | every row is used | head -n 1000 FILE.jsonl > part.jsonl
top_p top_k min_p | answers are sampled from all words, as the loss needs; a temperature below 1 makes
    likely ones likelier | leave it out
adam_beta1 adam_beta2 adam_epsilon beta1 beta2 | AdamW's betas are always 0.9 and 0.95, its
    epsilon 1e-8 | leave it out
simulate trace | the replay of a step was removed: it differed from the formula by at most 0.0 % |
    unfreeze plan --model MODEL --hardware 8xH200
sweep | plan takes several machines at once, but makes no table of ranks and lengths |
    unfreeze plan --model MODEL --hardware 8xH200 1xH200+768GB
group_by_length length_grouped_sampling | packing fills batches with documents of any length |
    unfreeze sft --model MODEL --data FILE --training.packing best_fit
run_name wandb_project project wandb_run_name | a run is named by its folder, --out; wandb's project by
    WANDB_PROJECT | unfreeze sft --model MODEL --data FILE --out runs/NAME --watch.track wandb
device_map max_memory cpu_offload offload offload_folder | --place.experts, .rest and .boundary offload parts
    of the model | unfreeze plan --model MODEL
"""
_COMMANDS = """
train finetune fine-tune tune lora qlora sft-lora | the command for fine-tuning is sft |
    unfreeze sft --model MODEL --data chat.jsonl
dpo ipo orpo simpo cpo preference | prefer learns from pairs of answers |
    unfreeze prefer --model MODEL --data pairs.jsonl
kto | prefer also learns from answers with a label |
    unfreeze prefer --loss kto --model MODEL --data FILE
reward-model | reward models are not built; TRL trains them |
    trl reward --model_name_or_path MODEL --dataset_name DATA
ppo rl rlhf gspo rloo dapo reinforce | grpo learns from rewards of the model's own answers |
    unfreeze grpo --model MODEL --data prompts.jsonl --reward my.py
distillation kd gkd teach | distill learns a teacher's probabilities |
    unfreeze distill --model MODEL --teacher DIR_OR_RUN --data chat.jsonl
merge-lora fuse bake merge-adapter merge-and-unload | merge writes base and adapter as one checkpoint |
    unfreeze merge RUN --to bf16
gguf convert ollama llama.cpp llama-cpp lmstudio | export writes a GGUF |
    unfreeze export RUN --for gguf, or --for ollama
quantise quantization quantisation int4 int8 fp8 nf4 mxfp4 nvfp4 bnb bitsandbytes compress | the command is
    quantize, for a model in bf16; a run is merged |
    unfreeze quantize MODEL --to int4 --out DIR; for a run: unfreeze merge RUN --to int4
awq gptq autoround llm-compressor | quantize writes INT4, INT8, FP8, MXFP4, NVFP4 and NF4 |
    unfreeze quantize MODEL --to int4 --out DIR
server api endpoint vllm openai | serve answers OpenAI's clients |
    unfreeze serve MODEL_OR_RUN
evaluate evaluation benchmark lm-eval | eval scores a model, or a run before and after |
    unfreeze eval RUN --tasks rows:test.jsonl, or a task of lm-eval
perplexity ppl score | eval measures the perplexity of a text |
    unfreeze eval MODEL --tasks ppl:book.txt
train-tokenizer vocab bpe | tokenizer train makes one from text |
    unfreeze tokenizer train corpus.jsonl --vocab 8192 --out tok
resize resize-embeddings resize-tokens add-tokens new-tokens | tokens are added from a file, one per line |
    unfreeze sft --model MODEL --data FILE --new-tokens new.txt
push upload push-to-hub | the command for uploads is export |
    unfreeze export RUN --for peft --push org/name --base-id org/base
new config wizard | init writes a run.toml with its reasons | unfreeze init MODEL DATA
download fetch pull | inspect downloads headers, training downloads the weights | unfreeze inspect org/name
infer inference run talk | chat talks with a model or a run | unfreeze chat MODEL_OR_RUN
preprocess prepare tokenize | training encodes the data itself; data show prints the supervised tokens |
    unfreeze data show FILE --model MODEL
sweep search tune-lr hpo | --sweep runs and compares each combination |
    unfreeze sft --model MODEL --data FILE --sweep learning_rate=1e-4,2e-4
resume continue | the same command resumes its run | the same command again
estimate memory vram cost | plan predicts a run's memory, time and cost | unfreeze plan --model MODEL
ui webui gui studio dashboard | there is no GUI; each run writes an HTML report | unfreeze report RUN
"""
_VALUES = """
for | llama.cpp llama-cpp lmstudio | llama.cpp and LM Studio read what --for gguf writes
for | hf huggingface transformers | for transformers use --for peft
for | tgi mlx onnx tensorrt lmdeploy | it can convert a merged model: unfreeze merge RUN --to bf16
to | gguf q8_0 | a GGUF: unfreeze export RUN --for gguf
to | q4_k_m q5_k_m q4_0 | a GGUF: unfreeze export RUN --for gguf, then llama.cpp's llama-quantize
to | fp16 float16 bfloat16 16bit merged_16bit | it is called bf16 here
to | 4bit w4a16 merged_4bit | it is called int4 here
to | nf4 int8 fp8 nvfp4 mxfp4 | merge --to same keeps a base of this format; quantize writes it of a model
to | awq gptq | merge --to same keeps a base of this format; quantize --to int4 has as many bits
to | bf16 same | quantize takes a bf16 model; a run becomes bf16 by unfreeze merge RUN --to bf16
dtype | bf16 | it is called bfloat16 here
dtype | fp32 | it is called float32 here
dtype | fp16 float16 half | float16 is not built
schedule | constant_with_warmup | it is called constant here, with --optimizer.warmup
schedule | cosine_with_restarts polynomial inverse_sqrt | it is not built
schedule | warmup_stable_decay | it is called wsd here
schedule | onecycle OneCycleLR one-cycle | it is called one_cycle here
train | lora qlora adapter peft | it is called adapters here
train | full fft freeze | it is called all here: every weight
loss | sigmoid | it is called dpo here
loss | grpo ppo rloo gspo | unfreeze grpo learns from rewards; its ppo is the loss of GRPO's paper
loss | hinge robust cpo bco sppo | it is not built; TRL has it
kind | adamw_8bit adam_8bit paged_adamw_8bit 8bit | it is --optimizer.moments int8 here
kind | adam adamw_torch adamw_torch_fused | it is called adamw here
kind | sgd adafactor lion shampoo soap | it is not built
moments | adamw_8bit adam_8bit paged_adamw_8bit 8bit | it is called int8 here
moments | adamw adamw_torch adamw_torch_fused | it is called float32 here
track | mlflow comet comet_ml neptune aim swanlab | it is not built; RUN/events.jsonl has every figure
packing | true | it is called first_fit here
packing | false | it is called none here
recompute | true full unsloth | it is called layers here
recompute | false none | it is called nothing here
"""


class Hint(NamedTuple):
    """Answer to another tool's word: our name for it, and the next command."""

    text: str
    next: str


def _rows(table: str) -> list[list[str]]:
    """Split a table into lines of cells; an indented line continues the previous one."""
    joined = re.sub(r"\n    ", " ", table.strip())
    return [[cell.strip() for cell in line.split("|")] for line in joined.splitlines()]


FIELDS = {word: (field, unit) for field, unit, words in _rows(_FIELDS) for word in words.split()}
"""Another tool's word -> (our field, its unit or form)."""
OTHER_UNIT = {
    *(word for word, (field, _) in FIELDS.items() if field in ("tokens_per_step", "micro_batches")),
    *"warmup_steps lr_warmup min_lr loss_weights prompts_per_batch rollout_batch_size".split(),
}
"""Words of FIELDS whose value is in another unit than our field's."""
NOT_HERE = {word: Hint(text, next) for words, text, next in _rows(_NOT_HERE) for word in words.split()}
"""Another tool's word without a field here -> an explanation and the next command."""
COMMANDS = {word: Hint(text, next) for words, text, next in _rows(_COMMANDS) for word in words.split()}
"""Another tool's command -> the shortest way to do it here, or the tool that does it."""
VALUES = {(field, word): text for field, words, text in _rows(_VALUES) for word in words.split()}
"""(Last part of a field's name, another tool's value) -> our value or an explanation."""


OF = {
    "distill": ("teacher", "alpha", "temperature"),
    "prefer": ("loss", "preference."),
    "grpo": ("reward", "answers", "max_new_tokens", "prompts_per_step", "beta", "scale", "updates", "clip_"),
}
"""Command -> prefixes of the fields in FIELDS that it has and sft does not."""


def _plain(word: str) -> str:
    return word.lstrip("-").replace("-", "_").lower()


def field_hint(
    word: str, known: Iterable[str], names: Mapping[str, str] | None = None, *, flag: bool = False
) -> str:
    """End of an error about an unknown field: our name and its unit, else the nearest known word, else "".

    names: alias -> dotted name; if given, the hint uses dotted names.
    """
    plain = _plain(word)
    if plain in FIELDS:
        name, unit = FIELDS[plain]
        if not names and (words := set(map(_plain, known))) and name not in words:
            return f"; training has it: unfreeze {_recipe(name)} --{name.replace('_', '-')}"
        name = (names or {}).get(name, name)
        return f"; it is called {'--' + name.replace('_', '-') if flag else name} here ({unit})"
    return f"; {NOT_HERE[plain].text}" if plain in NOT_HERE else nearest(word, known)


def _recipe(field: str) -> str:
    """Training command that has a field."""
    return next((recipe for recipe, begins in OF.items() if field.startswith(begins)), "sft")


def field_next(word: str, otherwise: str) -> str:
    """Remedy for an unknown field: that of NOT_HERE, or `otherwise`."""
    return NOT_HERE[_plain(word)].next if _plain(word) in NOT_HERE else otherwise


def value_hint(name: str, value: object) -> str:
    """End of an error about a value that is not a choice of a field, for any spelling of the field."""
    field, word = _plain(name).rpartition(".")[2].removeprefix("optimizer_"), str(value).lower()
    return f"; {VALUES[field, word]}" if (field, word) in VALUES else ""


def command_hint(word: str, known: Iterable[str]) -> Hint:
    """End of an error about an unknown command, and the next command."""
    plain = word.lower().replace("_", "-")
    near = nearest(word, known)
    if plain not in COMMANDS and not near:
        # letters in another order: trian gets the answer for train
        plain = next((word for word in COMMANDS if sorted(word) == sorted(plain)), plain)
    if plain in COMMANDS:
        hint = COMMANDS[plain]
        return Hint(f"; {hint.text}", hint.next)
    return Hint(near, "unfreeze --help")
