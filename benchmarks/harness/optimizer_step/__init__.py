"""A whole step of the optimizers: on one GPU, and on several."""
