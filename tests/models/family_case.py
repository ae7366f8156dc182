"""What a case of tests/models/test_families.py says, and the sizes and rotary tables that many of them share."""

from typing import Any, NamedTuple

import transformers


class Case(NamedTuple):
    """A small random model of transformers: its classes' common name ("Llama" for LlamaConfig and
    LlamaForCausalLM), and the fields of its config beside SMALL.

    config, model: the two classes' whole names, where they are spelled otherwise.
    renamed: (ours, transformers') parts of the names of parameters, where they differ.
    transposed: experts are [E, in, out] in transformers, ours are [E, out, in].
    fused: our modules whose rows lie one below the other in one tensor of transformers (three convolutions).
    With a text_config among the fields, SMALL goes there: the text model of a vision-language release.
    """

    name: str
    fields: dict[str, Any]
    config: str = ""
    model: str = ""
    renamed: tuple[tuple[str, str], ...] = ()
    transposed: bool = False
    fused: tuple[str, ...] = ()

    @property
    def config_class(self) -> str:
        return self.config or f"{self.name}Config"

    @property
    def model_class(self) -> str:
        return self.model or f"{self.name}ForCausalLM"

    @property
    def model_type(self) -> str:
        """Of the language model."""
        text = self.fields.get("text_config")
        return text["model_type"] if text else getattr(transformers, self.config_class).model_type

    def made(self, usual: dict[str, Any]) -> Any:
        """transformers' config: `usual` fields, and this case's above them."""
        text = self.fields.get("text_config")
        config_class = getattr(transformers, self.config_class)
        if text is None:
            return config_class(**{**usual, **self.fields})
        return config_class(**{**self.fields, "text_config": {**usual, **text}})

    def theirs(self, name: str) -> str:
        """transformers' name of our parameter; experts stacked in memory differ in a suffix."""
        if ".experts." in name and ".shared_expert" not in name:
            name = name.removesuffix(".weight")
        for ours, theirs in self.renamed:
            name = name.replace(ours, theirs)
        return name

    def turned(self, name: str, tensor: Any) -> Any:
        """transformers' tensor (or gradient) as ours lies."""
        experts = self.transposed and name.endswith(
            (".experts.gate_up_proj.weight", ".experts.down_proj.weight")
        )
        if tensor is None:
            return None
        for place, module in enumerate(self.fused):
            if f".{module}." in name:
                return tensor.chunk(len(self.fused))[place]
        return tensor.mT if experts else tensor


SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "rope_theta": 50000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
NESTED = (("model.", "model.language_model."),)
"""`renamed` of the text model of a vision-language release."""
VISION = {  # the smallest towers, which no test looks through
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

COMMON = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-3,
    "hidden_act": "silu",
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}
"""A config.json of usual sizes (test_config_fields.py makes them small), which each family adds its fields to."""
