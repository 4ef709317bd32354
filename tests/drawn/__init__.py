"""Scripts and layouts drawn at random, each compared with one process: settings that meet nowhere else."""
