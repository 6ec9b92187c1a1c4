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

# Architectures that llama.cpp knows (as of its Python package 0.3.36) and that are missing here: name -> what they need.
UNSUPPORTED: dict[str, str] = {
    "gemma4-assistant": "a cache of another model",
    **dict.fromkeys(("deepseek32", "glm-dsa", "dots3note"), "an indexer that chooses tokens to attend to, with a cache of its own"),
    **dict.fromkeys(("deepseek4", "glm5-next", "hy_v4"), "an indexer that chooses what to attend to, and caches of its kind"),
    "step35": "head counts and a rotation of each layer",
    "graniteswitch": "adapters inside the model",
    **dict.fromkeys(("eagle3", "dflash"), "hidden states of another model, for which they draft"),
    **dict.fromkeys(("wavtokenizer-dec", "clip"), "audio or images"),
    "gptj": "a graph, which llama.cpp lacks too",
}
