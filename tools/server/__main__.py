"""`python -m ggraph.tools.server` is ggraph-server."""
from .command import main

if __name__ == "__main__":
    main(prog_name="ggraph-server")
