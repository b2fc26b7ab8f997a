"""What only benchmarks and tests need: random weights in public models' shapes, and simulated acceptance."""
