"""ggraph-eval: the command of lm-evaluation-harness (package lm_eval), which knows the model `ggraph` as well.

In: lm_eval's own command line. Out: its tables and files.
"""
from __future__ import annotations

import sys


def main() -> None:
    """`ggraph-eval run --model ggraph --model_args pretrained=FILE --tasks ...`"""
    try:
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry
    except ImportError as e:
        sys.exit(f"error: ggraph-eval needs lm_eval ({e}); install it with: pip install 'ggraph-runtime[eval]'")
    if "ggraph" not in model_registry:
        model_registry.register("ggraph", target="ggraph.tools.lm_eval:GgraphLM")
    cli_evaluate()


if __name__ == "__main__":
    main()
