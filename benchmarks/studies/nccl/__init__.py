"""All-reduce by NCCL, this backend and gloo side by side, as nccl-tests has it."""
