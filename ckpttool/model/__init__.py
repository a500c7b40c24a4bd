"""What things are: a checkpoint, a directory of them, the pointer, the training schema."""
