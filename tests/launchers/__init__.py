"""Jobs as launchers start them: torchrun with agents, Slurm, Kubernetes."""
