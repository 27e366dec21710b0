"""What the job runs on: GPUs, nodes, host RAM, disk."""
