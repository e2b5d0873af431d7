"""The configuration: schemas, composition by Hydra, lengths as they are typed."""
