"""Architectures: one module each, found by `general.architecture` with `-` written `_`."""

# GGUF name -> module, where two architectures differ in nothing but their keys and values or a name is no module name.
ALIASES: dict[str, str] = {
    "codeshell": "starcoder2",
    "hunyuan-dense": "hunyuan_vl",
    "internlm2": "llama",
    "jina-bert-v3": "bert",
    "lfm2moe": "lfm2",
    "mistral4": "deepseek2",
    "nemotron_h_moe": "nemotron_h",
    "nomic-bert": "bert",
    "nomic-bert-moe": "bert",
    "starcoder": "gpt2",
    "xverse": "llama",
}
