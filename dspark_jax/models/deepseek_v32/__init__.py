"""DeepSeek-V3.2: latent attention over the rows that an indexer chooses, mixture of experts."""
