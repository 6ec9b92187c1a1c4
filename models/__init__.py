"""Architectures: one module each, found by `general.architecture` with `-` written `_`."""

# GGUF name -> module, where two architectures differ in nothing but their keys and values or a name is no module name.
ALIASES: dict[str, str] = {
    "codeshell": "starcoder2",
    "hunyuan-dense": "hunyuan_vl",
    "internlm2": "llama",
    "lfm2moe": "lfm2",
    "mistral4": "deepseek2",
    "nemotron_h_moe": "nemotron_h",
    "starcoder": "gpt2",
    "xverse": "llama",
}
