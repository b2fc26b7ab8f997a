"""What all kernels run on: lazy imports, launches, the CPU thread team, recorded CPU calls."""
