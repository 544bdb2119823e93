"""Documents and markup: what is made of sentences, translated by a `TranslationPipeline`."""
