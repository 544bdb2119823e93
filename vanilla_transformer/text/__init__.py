"""Translation of documents and HTML with a `TranslationPipeline`."""
