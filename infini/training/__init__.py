"""Training: one LightningModule for every model, optimizers with the gates in their own group, checkpoints."""
