"""Training over several processes of one site, under torchrun: DDP and FSDP2, one run together."""
