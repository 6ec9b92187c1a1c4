"""From graph to plan, in small passes: assign nodes to backends, split, allocate by lifetime, compile, keep."""
